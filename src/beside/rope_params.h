// What the kernels for queries and keys on their way to attention read: norms, rotation, a cache's new rows. Host code,
// no CUDA needed. Strides are in elements; the head dimension itself is contiguous everywhere.
#pragma once

#include <algorithm>

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
  float* partial;         ///< [parts_of(rows), head_dim], the weight's gradient by parts of the rows; null: none
  void* weight_gradient;  ///< of the weight's type

  // Set by launch(). 2^lanes_log2 threads share a row: each has an item of it, two runs of elements whose pairs it has
  // whole (with one element to a run it may have several). They go through every `slots`-th head of a token.
  int items, lanes_log2, slots, steps, units, blocks, parts;
  Divisor by_slots;

  bool there() const { return x && num_heads > 0 && head_dim > 0; }
};

/// RMSNorm of each row of q and k, then its rotation. Row i of sequence n has position start + first[n] - before[n] +
/// i, or its own of `positions`. Packed: a batch of 1, whose rows cu_seqlens[n] to cu_seqlens[n + 1] are sequence n;
/// others become 0, or are left alone where out is x, and go to no cache.
struct RopeParams : CachePlaces {    // cache_seqlens is null: there is no cache, and no v
  static constexpr int kNarrow = 4;  ///< elements of a run, where rows aren't made of 16-byte vectors, but of these
  static constexpr int kRowsTogether = 2;  ///< of a thread

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
  bool inverse;           ///< by minus the angles, as gradients always are
  bool norm;
  float eps, weight_offset;
  int* seqused_k;  ///< [sequences]: becomes cache_seqlens and the new rows; null without a cache

  // Set by launch().
  int early;            ///< blocks that may be there while the kernel ahead in the stream runs
  bool alone;           ///< each block has an SM of its own
  int width;            ///< elements of a run: a 16-byte vector, or kNarrow; 1 where rows aren't made of vectors
  uint32_t keys_share;  ///< of the blocks of q and k those of k, in 2^-32, rounded up; 0 where not both have some
  float per_element;    ///< 1 / head_dim
  Divisor by_seqlen;

  bool empty() const { return batch == 0 || seqlen == 0 || !(q.there() || k.there() || v.there()); }
};

/// The gradients of q, k and the weights, from those of what q and k became. Each block sums what its rows give for the
/// weight, in an order of its own; a second launch sums the blocks.
struct RopeBackwardParams : RopeParams {
  static constexpr int kRowsOfPart = 16;  ///< at least
  static constexpr int kColumns = 4;      ///< of a block of the second launch

  int parts;  ///< of q and k together, about: as many blocks as the device runs at once

  int64_t tokens() const { return int64_t(batch) * seqlen; }
  int parts_of(RopeRows const& rows) const {
    int64_t const own = tokens() * rows.num_heads, all = tokens() * (int64_t(q.num_heads) + k.num_heads);
    if (own == 0) return 1;
    int64_t const share = std::max<int64_t>(1, parts * own / all);
    return int(std::min(share, (own + kRowsOfPart - 1) / kRowsOfPart));
  }
};

/// Throws std::invalid_argument for numbers that contradict each other.
void check(RopeParams const& p);

}  // namespace cutlass_fmha
