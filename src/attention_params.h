// What a launch of attention is asked, whichever family of rows takes it. Host code, no CUDA needed.
#pragma once

#include "features/params.h"

namespace cutlass_fmha {

/// How a plain row's last tiles are divided: see Tail. Numbers of any size: a launch checks them.
struct TailRequest {
  float* tail = nullptr;  ///< 16-byte aligned, tail_tiles * tail_parts * tile_m * (head_dim + 2) floats; null: no tail
  int64_t tail_tiles = 0, tail_parts = 0, tail_first = 0, tail_rest = 0;
};

/// What the launch finds out is not set yet.
struct AttentionParams : FeatureParams, TailRequest {
  bool packs_mask = false;  ///< what a call has room for are mask_bits

  bool empty() const { return batch == 0 || seqlen_q == 0 || num_heads == 0; }
};

/// A copy for one call, which threads that share a plan can't meet in. `room`: for the parts of split keys, or of a
/// tail: see TailRequest, or for mask_bits; 0 without them.
AttentionParams of_call(AttentionParams const& plan, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t o, uintptr_t lse,
                        double scale, uintptr_t room);

/// What FeatureParams::vectors promises, of elements of so many bytes. Never taken from a caller.
bool all_vectors(FeatureParams const& p, int element_bytes);

/// What FeatureParams::device_lengths says.
bool device_lengths(FeatureParams const& p);

/// Throws std::invalid_argument where sizes, strides and flags contradict each other, whatever the row.
void check(AttentionParams const& p, int element_bytes);

}  // namespace cutlass_fmha
