// Rotary embedding, of queries and of keys on their way into a cache.
#pragma once

#include <cmath>

#include "elements.cuh"

namespace cutlass_fmha {

/// What the elements column .. column + Width of a row are rotated with. sin has the sign of its element: negative for
/// the first of a pair.
template <int Width>
struct Rotation {
  float partner[Width], cos[Width], sin[Width];
};

/// cos or sin of the pairs first, first + 1, ...
template <class T, int Count>
__device__ void read_angles(void const* table, bool float32, int64_t first, float (&x)[Count]) {
  if (float32) {
    Chunk<float, Count>::load(static_cast<float const*>(table) + first).read(x);
  } else {
    Chunk<T, Count>::load(static_cast<T const*>(table) + first).read(x);
  }
}

/// Pairs of neighbours. `x`: the elements themselves; a chunk of several has their partners.
template <class T, int Width>
__device__ Rotation<Width> interleaved(T const* row, float const (&x)[Width], int column, Rotary const& rotary,
                                       int position) {
  constexpr int kPairs = Width > 1 ? Width / 2 : 1;
  Rotation<Width> r;
  float cos[kPairs], sin[kPairs];
  read_angles<T>(rotary.cos, rotary.float32, position * rotary.cos_stride + column / 2, cos);
  read_angles<T>(rotary.sin, rotary.float32, position * rotary.sin_stride + column / 2, sin);
  if constexpr (Width == 1) Chunk<T, 1>::load(row + (column ^ 1)).read(r.partner);
#pragma unroll
  for (int n = 0; n < Width; ++n) {
    if constexpr (Width > 1) r.partner[n] = x[n ^ 1];
    r.cos[n] = cos[n / 2];
    r.sin[n] = (column + n) % 2 ? sin[n / 2] : -sin[n / 2];
  }
  return r;
}

/// Pairs of an element of the first half and one of the second. No chunk has elements of both.
template <class T, int Width>
__device__ Rotation<Width> halves(T const* row, int column, Rotary const& rotary, int position) {
  int const half = rotary.dim / 2;
  bool const second = column >= half;
  int const pair = second ? column - half : column;
  Rotation<Width> r;
  Chunk<T, Width>::load(row + (second ? pair : column + half)).read(r.partner);
  read_angles<T>(rotary.cos, rotary.float32, position * rotary.cos_stride + pair, r.cos);
  read_angles<T>(rotary.sin, rotary.float32, position * rotary.sin_stride + pair, r.sin);
#pragma unroll
  for (int n = 0; n < Width; ++n) r.sin[n] = second ? r.sin[n] : -r.sin[n];
  return r;
}

/// Elements column .. column + Width of a row, rotated where the rotation reaches. Computed in fp32, rounded once.
template <class T, int Width>
__device__ Chunk<T, Width> rotated(T const* row, int column, Rotary const& rotary, int position) {
  Chunk<T, Width> chunk = Chunk<T, Width>::load(row + column);
  if (!rotary.cos || column >= rotary.dim) return chunk;
  float x[Width];
  chunk.read(x);
  if (unsigned(position) < unsigned(rotary.positions)) {
    Rotation<Width> const r = rotary.interleaved ? interleaved<T, Width>(row, x, column, rotary, position)
                                                 : halves<T, Width>(row, column, rotary, position);
#pragma unroll
    for (int n = 0; n < Width; ++n) x[n] = fmaf(x[n], r.cos[n], r.partner[n] * r.sin[n]);
  } else {
#pragma unroll
    for (int n = 0; n < Width; ++n) x[n] = NAN;
  }
  chunk.write(x);
  return chunk;
}

__device__ inline int first_position(FirstPosition const& p, int sequence) {
  return p.first[sequence] - (p.before ? p.before[sequence] : 0);
}

template <class T, int Width>
__device__ void rotate_row(RotaryParams const& p, Row const& row, Lane const& lane) {
  Token const token = token_of(p.cu_seqlens, p.sequences, row);
  if (token.sequence < 0) return;
  int const position = first_position(p.position, token.sequence) + (p.advance ? token.position : 0);
  T const* const x = static_cast<T const*>(p.x) + row.offset(p.x_stride);
  T* const out = static_cast<T*>(p.out) + row.offset(p.out_stride);
  for (int column = lane.lane * Width; column < p.head_dim; column += lane.lanes * Width) {
    rotated<T, Width>(x, column, p.rotary, position).store(out + column);
  }
}

template <class T>
__device__ void rotary(RotaryParams const& p) {
  Lane const lane(p.lanes_log2);
  if (lane.row >= int64_t(p.batch) * p.seqlen * p.num_heads) return;
  Row const row = row_of(int(lane.row), p.by_num_heads, p.num_heads, p.by_seqlen, p.seqlen);
  if (p.vectors) {
    rotate_row<T, kWidth<T>>(p, row, lane);
  } else {
    rotate_row<T, 1>(p, row, lane);
  }
}

/// Where a new row goes in the cache: its offset without the head's, -1 when there is no place for it.
__device__ inline int64_t place_of(CachePlaces const& p, Token const& token, Strides const& s) {
  if (token.sequence < 0) return -1;
  int const first = p.cache_seqlens[token.sequence];
  if (first < 0 || first >= p.capacity - token.position) return -1;
  int entry = token.sequence, at = first + token.position;
  if (p.page_table) {
    int const page = p.by_page_size.quotient(at);
    entry = p.page_table[token.sequence * p.page_table_stride + page];
    at -= page * p.page_size;
  } else if (p.cache_batch_idx) {
    entry = p.cache_batch_idx[token.sequence];
  }
  return entry < 0 || entry >= p.entries ? -1 : entry * s.batch + at * s.seqlen;
}

template <class T, int Width>
__device__ void append_key(AppendParams const& p, Row const& row, Lane const& lane) {
  Token const token = token_of(p.cu_seqlens, p.sequences, row);
  int64_t const place = place_of(p, token, p.k_cache_stride);
  if (place < 0) return;
  T const* const from = static_cast<T const*>(p.k) + row.offset(p.k_stride);
  T* const to = static_cast<T*>(p.k_cache) + place + row.head * p.k_cache_stride.head;
  int const position = first_position(p.position, token.sequence) + token.position;
  for (int column = lane.lane * Width; column < p.head_dim; column += lane.lanes * Width) {
    rotated<T, Width>(from, column, p.rotary, position).store(to + column);
  }
}

template <class T, int Width>
__device__ void append_value(AppendParams const& p, Row const& row, Lane const& lane) {
  int64_t const place = place_of(p, token_of(p.cu_seqlens, p.sequences, row), p.v_cache_stride);
  if (place < 0) return;
  T const* const from = static_cast<T const*>(p.v) + row.offset(p.v_stride);
  T* const to = static_cast<T*>(p.v_cache) + place + row.head * p.v_cache_stride.head;
  for (int column = lane.lane * Width; column < p.head_dim_v; column += lane.lanes * Width) {
    Chunk<T, Width>::load(from + column).store(to + column);
  }
}

/// One thread for each sequence: one may have no new row, whose thread could do it. `seqlen`: of each, where rows are
/// not packed.
__device__ inline void count_rows(int* seqused_k, int const* cache_seqlens, int const* cu_seqlens, int sequences,
                                  int seqlen) {
  int64_t const n = int64_t(blockIdx.x) * kHelperThreads + threadIdx.x;
  if (!seqused_k || n >= sequences) return;
  seqused_k[n] = cache_seqlens[n] + (cu_seqlens ? cu_seqlens[n + 1] - cu_seqlens[n] : seqlen);
}

/// What the blocks of a launch do, by blockIdx.y.
enum AppendPart { kAppendKeys, kAppendValues, kRotateQueries };

template <class T>
__device__ void append(AppendParams const& p) {
  int const part = blockIdx.y;
  if (part == kRotateQueries) return rotary<T>(p.query);
  if (part == kAppendKeys) count_rows(p.seqused_k, p.cache_seqlens, p.cu_seqlens, p.sequences, p.seqlen_new);
  Lane const lane(p.lanes_log2);
  if (lane.row >= int64_t(p.batch) * p.seqlen_new * p.num_heads_kv) return;
  Row const row = row_of(int(lane.row), p.by_num_heads_kv, p.num_heads_kv, p.by_seqlen_new, p.seqlen_new);
  if (p.vectors) {
    part == kAppendKeys ? append_key<T, kWidth<T>>(p, row, lane) : append_value<T, kWidth<T>>(p, row, lane);
  } else {
    part == kAppendKeys ? append_key<T, 1>(p, row, lane) : append_value<T, 1>(p, row, lane);
  }
}

}  // namespace cutlass_fmha
