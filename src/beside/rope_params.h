// What the kernels for queries and keys on their way to attention read: norms, rotation, a cache's new rows. Host code,
// no CUDA needed. Strides are in elements; the head dimension itself is contiguous everywhere.
#pragma once

#include "../helpers/params.h"

namespace cutlass_fmha {

/// The rows of queries, keys or values, [batch, seqlen, num_heads, head_dim].
struct RopeRows {
  void const* x;
  void* out;  ///< may be x; keys' and values' with a cache: that. Of the backward: the gradient of x
  Strides x_stride, out_stride;
  int num_heads, head_dim;
  void const* weight;   ///< [head_dim]; null: 1
  bool weight_float32;  ///< otherwise of the rows' type

  // Of the backward alone.
  void const* gradient;  ///< of what x became
  Strides gradient_stride;
  float* partial;  ///< [parts, head_dim], zeros: what becomes of the weight's gradient in each block; null: none

  // Set by launch(). 2^lanes_log2 threads share a row: each has an item of it, two runs of elements whose pairs it has
  // whole (with one element to a run it may have several). They go through every `slots`-th head of a token.
  int items, lanes_log2, slots, steps, blocks;
  Divisor by_slots;

  bool there() const { return x && num_heads > 0 && head_dim > 0; }
};

/// RMSNorm of each row of q and k, then its rotation. Row i of sequence n has position start + first[n] - before[n] + i,
/// or its own of `positions`. Packed: a batch of 1, whose rows cu_seqlens[n] to cu_seqlens[n + 1] are sequence n; others
/// become 0, or are left alone where out is x, and go to no cache.
struct RopeParams : CachePlaces {  // cache_seqlens is null: there is no cache, and no v
  RopeRows q, k, v;
  int batch, seqlen, head_dim;
  int const* cu_seqlens;  ///< [sequences + 1]; null: each batch entry is a sequence
  int sequences;
  FirstPosition position;  ///< first may be null: 0
  int start;
  int const* positions;  ///< [batch, seqlen], or null
  int64_t positions_stride[2];
  Rotary rotary;          ///< dim is 0: nothing is rotated
  float const* inv_freq;  ///< [dim / 2], in place of rotary.cos and sin: the angle is position * inv_freq
  bool inverse;           ///< by minus the angles
  bool norm;
  float eps, weight_offset;
  int* seqused_k;  ///< [sequences]: becomes cache_seqlens and the new rows; null without a cache

  // Set by launch().
  bool vectors;
  Divisor by_seqlen;

  bool empty() const { return batch == 0 || seqlen == 0 || !(q.there() || k.there() || v.there()); }
};

/// The gradients of q, k and the weights, from those of what q and k became.
struct RopeBackwardParams : RopeParams {
  static constexpr int kParts = 1056;  ///< blocks that sum gradients of a weight: 8 on each SM of a large GPU
};

/// Throws std::invalid_argument for numbers that contradict each other.
void check(RopeParams const& p);

}  // namespace cutlass_fmha
