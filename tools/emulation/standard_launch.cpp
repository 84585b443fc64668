#include "standard_launch.h"

#include <optional>

#include "core/scheduler.h"
#include "device_guard.h"
#include "emulation.h"
#include "reference.h"

namespace cutlass_fmha {
namespace {

/// With the shared memory that makes an sm_90 hold as many blocks as sm_89 does.
std::optional<StandardRow> find(int head_dim, bool other) {
  auto const padded = [&](StandardRow row) {
    row.smem_bytes = emulated_smem_bytes(row.smem_bytes, row.config.warps);
    return row;
  };
  switch (head_dim) {
    case 32:
      return padded(standard_tile_32(other));
    case 64:
      return padded(standard_tile_64(other));
    case 96:
      return padded(standard_tile_96(other));
    case 128:
      return padded(standard_tile_128(other));
    case 192:
      return padded(standard_tile_192(other));
    case 256:
      return padded(standard_tile_256(other));
    default:
      return std::nullopt;
  }
}

void const* symbol(StandardRow const& row) { return reinterpret_cast<void const*>(row.kernel); }

cudaError_t allow_shared_memory(StandardRow const& row) {
  return cudaFuncSetAttribute(symbol(row), cudaFuncAttributeMaxDynamicSharedMemorySize, row.smem_bytes);
}

ForwardParams make_params(int head_dim, bool causal, int batch, int seqlen, int heads, float scale) {
  ForwardParams p{};
  Strides const strides{int64_t(seqlen) * heads * head_dim, int64_t(heads) * head_dim, head_dim};
  p.q_stride = p.k_stride = p.v_stride = p.o_stride = strides;
  p.batch = batch;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.num_heads = p.num_heads_kv = heads;
  p.diagonal = causal ? 0 : kNoDiagonal;
  set_scale(p, scale);
  return p;
}

}  // namespace
}  // namespace cutlass_fmha

using namespace cutlass_fmha;

int fmha_launch_standard_tile(int head_dim, int other, int causal, void const* q, void const* k, void const* v, void* o,
                              int batch, int seqlen, int heads, float scale, void* stream) {
  auto const row = find(head_dim, other != 0);
  if (!row) return -1;
  ForwardParams p = make_params(head_dim, causal != 0, batch, seqlen, heads, scale);
  p.q = q, p.k = k, p.v = v, p.o = o;
  if (cudaError_t const status = allow_shared_memory(*row); status != cudaSuccess) return status;
  int device = 0;
  if (cudaError_t const status = cudaGetDevice(&device); status != cudaSuccess) return status;
  p.order = tile_order(p, row->config, gpu_of(device));  // as launch_plain() has it
  void* arguments[] = {&p};
  return cudaLaunchKernel(symbol(*row), dim3(unsigned(grid_size(p, row->config.tile_m))), dim3(row->config.threads()),
                          arguments, row->smem_bytes, static_cast<cudaStream_t>(stream));
}

int fmha_standard_tile(int head_dim, int other, FmhaStandardTile* tile) {
  auto const row = find(head_dim, other != 0);
  if (!row) return -1;
  *tile = {row->config.tile_m, row->config.tile_n, row->config.warps, row->smem_bytes, 0, 0};
  cudaFuncAttributes attributes{};
  cudaError_t status = allow_shared_memory(*row);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, symbol(*row));
  tile->registers = attributes.numRegs;
  if (status != cudaSuccess) return status;
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&tile->blocks_per_sm, symbol(*row), row->config.threads(),
                                                       row->smem_bytes);
}
