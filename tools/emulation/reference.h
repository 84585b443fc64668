// What tools/emulate.py calls through ctypes: kernels of an emulation build that rows are held against.
#pragma once

#include <cuda_runtime.h>

#pragma GCC visibility push(default)
extern "C" {

/// Runs the mma of `key_blocks` blocks of 64 keys for 32 query rows per warp, 8 warps on each of `sms` SMs. head_dim:
/// 64 or 128. Returns the useful floating-point operations, those of repeated passes aside; -1 when CUDA refuses.
double fmha_launch_ceiling(int head_dim, int key_blocks, int sms, void* stream);

/// A tile of FlashAttention-2's, as launched.
struct FmhaStandardTile {
  int tile_m, tile_n, warps, smem_bytes, registers, blocks_per_sm;
};

/// bf16 attention over contiguous [batch, seqlen, heads, head_dim] tensors, in the one or the other tile of a head_dim.
/// Returns a cudaError_t, or -1 for a head_dim without tiles.
int fmha_launch_standard_tile(int head_dim, int other, int causal, void const* q, void const* k, void const* v, void* o,
                              int batch, int seqlen, int heads, float scale, void* stream);
int fmha_standard_tile(int head_dim, int other, FmhaStandardTile* tile);
}
#pragma GCC visibility pop
