// What stands before and after the backward's main kernel: what it wants of each query row, with dQ's sums at zero, and
// what becomes of these; zeros where no sequence is.
#pragma once

#include "../helpers/elements.cuh"
#include "layout.cuh"
#include "listed_tile.cuh"
#include "overlap.cuh"

namespace cutlass_fmha {

/// Some query rows of a head: block `number` of those that have so many `rows` each.
struct QueryRows {
  int head, begin;
  Sequence sequence;

  __device__ QueryRows(BackwardParams const& p, int rows, int number) {
    int const blocks = ceil_div(p.seqlen_q, rows), sequence_head = number / blocks;
    int const batch = sequence_head / p.num_heads;
    head = sequence_head - batch * p.num_heads;
    begin = (number - sequence_head * blocks) * rows;
    sequence = sequence_at(p, batch);
  }
  /// Where row `row` of the sequence stands.
  __device__ int64_t offset(Strides const& stride, int row) const {
    return sequence.entry_q * stride.batch + head * stride.head + int64_t(sequence.first_q + row) * stride.seqlen;
  }
  /// Of a query tile of the sequence, in the workspace.
  __device__ int64_t tile_number(BackwardParams const& p, int tile) const {
    return head * p.head_tiles + first_query_tile(p, sequence, p.tile_m) + tile;
  }
};

/// The sum of eight products.
template <class T>
__device__ float dot(Chunk<T, 8> const& a, Chunk<T, 8> const& b) {
  float x[8], y[8], sum = 0.f;
  a.read(x);
  b.read(y);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

/// The sum of what the threads of a block have, in a fixed order, known to the first.
__device__ inline float block_sum(float x) {
  __shared__ float sums[kHelperThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (int warp = 0; warp < kHelperThreads / 32; ++warp) sum += sums[warp];
  return sum;
}

/// The packed sequence that has a row, if one has.
__device__ inline int sequence_of(int const* ends, int batch, int row) {
  if (row >= ends[batch]) return -1;
  int before = -1, behind = batch;
  while (behind - before > 1) {
    int const middle = (before + behind) / 2;
    (ends[middle] <= row ? before : behind) = middle;
  }
  return before;
}

/// Of a row of a gradient, all heads, by a warp.
template <class T>
__device__ void write_zeros(void* tensor, Strides const& stride, int entry, int row, int heads, int head_dim) {
  if (tensor == nullptr) return;
  T* const to = static_cast<T*>(tensor) + entry * stride.batch + row * stride.seqlen;
  int const chunks = head_dim / 8;
  for (int i = threadIdx.x % 32; i < heads * chunks; i += 32) {
    int const head = i / chunks;
    Chunk<T, 8>{}.store(to + head * stride.head + (i - head * chunks) * 8);
  }
}

/// Of kRestRows rows of dQ, or of dK and dV, those that are zeros: no other block writes them.
template <class T>
__device__ void backward_rest(BackwardParams const& p, int64_t number) {
  int64_t const of_queries = rest_blocks_of_queries(p);
  bool const queries = number < of_queries;
  int const* const ends = queries ? p.cu_seqlens_q : p.cu_seqlens_k;
  int64_t const rows_of_entry = queries ? p.lse_head_stride : p.rows_k;
  int64_t const rows = queries ? rows_of_entry : rows_of_keys(p);
  auto const is_rest = [&](int entry, int row) {
    int const batch = ends == nullptr ? entry : sequence_of(ends, p.batch, row);
    if (batch < 0) return true;
    Sequence const s = sequence_at(p, batch);
    int const own = row - (queries ? s.first_q : s.first_k);
    return own < 0 || own >= (queries ? s.rows_q : s.keys);
  };
  static_assert(kRestRows == kHelperThreads);
  int64_t const begin = (queries ? number : number - of_queries) * kRestRows, mine = begin + threadIdx.x;
  bool const rests = mine < rows && is_rest(int(mine / rows_of_entry), int(mine % rows_of_entry));
  int64_t row = begin + threadIdx.x / 32 * 32;
  for (uint32_t rest = __ballot_sync(0xffffffffu, rests); rest != 0; rest >>= 1, ++row) {
    if (rest % 2 == 0) continue;
    int const entry = int(row / rows_of_entry), of_entry = int(row % rows_of_entry);
    if (queries) {
      write_zeros<T>(p.dq, p.dq_stride, entry, of_entry, p.num_heads, p.head_dim);
    } else {
      write_zeros<T>(p.dk, p.dk_stride, entry, of_entry, p.num_heads_kv, p.head_dim);
      write_zeros<T>(p.dv, p.dv_stride, entry, of_entry, p.num_heads_kv, p.head_dim_v);
    }
  }
}

/// A block has a tile of queries, or some of the rows that are nobody's.
template <class T>
__device__ void backward_before(BackwardParams const& p) {
  meet_dependents();
  constexpr int kLanes = 8, kPass = kHelperThreads / kLanes;  // lanes of a row; rows of all threads
  constexpr int kAhead = 8 / int(sizeof(T));                  // rows of a lane that are on their way at once
  int const tiles = p.batch * p.num_heads * ceil_div(p.seqlen_q, p.tile_m);
  if (blockIdx.x >= tiles) return backward_rest<T>(p, blockIdx.x - tiles);
  QueryRows const rows(p, p.tile_m, blockIdx.x);
  Sequence const& s = rows.sequence;
  if (rows.begin >= s.rows_q) return;
  int64_t const tile = rows.tile_number(p, rows.begin / p.tile_m);
  auto* const sums = reinterpret_cast<float4*>(p.dq_sums + tile * p.tile_m * p.row_dim);
  int const count = p.dq == nullptr ? 0 : p.tile_m * p.row_dim / 4;
  for (int i = threadIdx.x; i < count; i += kHelperThreads) sums[i] = {0.f, 0.f, 0.f, 0.f};
  if (p.turns != nullptr && threadIdx.x < kTurns) p.turns[tile * kTurns + threadIdx.x] = 0;
  float* const terms = p.row_terms + tile * kTermsOfQuery * p.tile_m;
  int const lane = threadIdx.x % kLanes;
  // A sink is a key without a value: dS of it is -P D.
  float const sink = p.dsinks == nullptr ? 0.f : p.sinks[rows.head];
  float of_sink = 0.f;
  int64_t const first_lse = s.batch * p.lse_batch_stride + rows.head * p.lse_head_stride + s.first_q;
  auto const* const o = static_cast<T const*>(p.o) + rows.offset(p.o_stride, 0);
  auto const* const dout = static_cast<T const*>(p.dout) + rows.offset(p.dout_stride, 0);
  for (int first = threadIdx.x / kLanes; first < p.tile_m; first += kAhead * kPass) {
    float sums_of[kAhead] = {}, natural_of[kAhead];
    int const end = smaller(p.tile_m, s.queries - rows.begin);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int const row = first + i * kPass;
      natural_of[i] = row < end ? p.lse[first_lse + rows.begin + row] : INFINITY;
    }
    for (int at = lane * 8; at < p.head_dim_v; at += kLanes * 8) {
      Chunk<T, 8> a[kAhead]{}, b[kAhead]{};
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i * kPass >= end) break;
        int64_t const query = rows.begin + first + i * kPass;
        a[i] = Chunk<T, 8>::load(o + query * p.o_stride.seqlen + at);
        b[i] = Chunk<T, 8>::load(dout + query * p.dout_stride.seqlen + at);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) sums_of[i] += dot(a[i], b[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int const row = first + i * kPass;
      if (row >= p.tile_m) break;
      float const natural = natural_of[i], lse = natural == -INFINITY ? INFINITY : natural * kLog2e;
      float sum = sums_of[i];
      if (p.dlse != nullptr && lane == 0 && lse != INFINITY) sum -= p.dlse[first_lse + rows.begin + row];
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane > 0) continue;
      int const of_unit = row % p.unit;
      float* const unit = terms + kTermsOfQuery * (row - of_unit);
      unit[of_unit] = lse;
      unit[p.unit + of_unit] = -sum;
      of_sink -= lse == INFINITY ? 0.f : exp2_approx((sink - natural) * kLog2e) * sum;
    }
  }
  if (p.dsinks == nullptr) return;
  of_sink = block_sum(of_sink);
  if (threadIdx.x == 0) p.sink_sums[tile] = of_sink;
}

/// The transpose of block lists: a block has a tile of keys, of which it lists the tiles of queries.
template <class T>
__device__ void backward_lists(BackwardParams const& p) {
  meet_dependents();
  __shared__ int of_warps[kHelperThreads / 32];
  int const key_tiles = ceil_div(p.seqlen_k, p.tile_n), sequence_head = blockIdx.x / key_tiles;
  int const batch = sequence_head / p.num_heads_kv, head_kv = sequence_head - batch * p.num_heads_kv;
  int const key_begin = (blockIdx.x - sequence_head * key_tiles) * p.tile_n;
  Sequence const s = sequence_at(p, batch);
  if (key_begin >= s.keys) return;
  ListedTile* const listed = p.listed + blockIdx.x * listed_room(p, p.tile_m);
  int const group = p.num_heads / p.num_heads_kv, tiles = ceil_div(s.queries, p.tile_m), all = group * tiles;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int count = 0;
  for (int begin = 0; begin < all; begin += kHelperThreads) {
    ListedTile mine{};
    for (int i = 0; i < 32; ++i) {
      int const number = begin + warp * 32 + i, head = number / tiles;
      if (number >= all) break;
      ListedTile const found = listed_tile(p, s, head_kv, head, number - head * tiles, key_begin);
      if (i == lane) mine = found;
    }
    uint32_t const there = __ballot_sync(0xffffffffu, mine.pieces != 0);
    if (lane == 0) of_warps[warp] = __popc(there);
    __syncthreads();
    int at = count + __popc(there & ((1u << lane) - 1));
    for (int i = 0; i < kHelperThreads / 32; ++i) {
      if (i < warp) at += of_warps[i];
      count += of_warps[i];
    }
    bool const named = mine.pieces != 0;
    if (named) listed[at] = mine;
    if (p.listed_steps != nullptr && begin + int(threadIdx.x) < all) {
      int64_t const steps = listed_steps_of(p, batch, head_kv * group + mine.head, mine.tile, p.tile_m, p.tile_n);
      p.listed_steps[steps + key_begin / p.tile_n] = named ? at : -1;
    }
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  listed[count] = {};
  p.listed_tiles[blockIdx.x] = count;
}

/// dSink of a head.
__device__ inline void sum_sinks(BackwardParams const& p, int head) {
  float sum = 0.f;
  for (int batch = 0; batch < p.batch; ++batch) {
    Sequence const s = sequence_at(p, batch);
    float const* const from = p.sink_sums + head * p.head_tiles + first_query_tile(p, s, p.tile_m);
    for (int tile = threadIdx.x; tile < ceil_div(s.rows_q, p.tile_m); tile += kHelperThreads) sum += from[tile];
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.dsinks[head] = sum;
}

/// A block has kRowsAfter queries.
template <class T>
__device__ void backward_after(BackwardParams const& p) {
  meet_dependents();
  constexpr int kMaxDim = 256, kPadding = 8;
  __shared__ __align__(16) T staged[kRowsAfter][kMaxDim + kPadding];
  if (p.dsinks != nullptr && blockIdx.x < p.num_heads) sum_sinks(p, blockIdx.x);
  if (p.dq == nullptr) return;
  QueryRows const rows(p, kRowsAfter, blockIdx.x);
  Sequence const& s = rows.sequence;
  if (rows.begin >= s.rows_q) return;
  int const tile = rows.begin / p.tile_m, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float const* const sums = p.dq_sums + rows.tile_number(p, tile) * p.tile_m * p.row_dim;
  constexpr int kAhead = 4, kPass = 8 * (kHelperThreads / 32);  // pieces on their way at once; columns of all warps
  for (int first = 8 * warp; first < p.head_dim; first += kAhead * kPass) {
    float4 ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int const column = first + i * kPass;
      if (column >= p.head_dim) break;
      ahead[i] = read_sums(sums + sum_offset(p.row_dim, rows.begin - tile * p.tile_m, column), lane);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      int const row = lane / 4, at = first + i * kPass + lane % 4 * 2;
      if (first + i * kPass >= p.head_dim) break;
      float4 const x = ahead[i];
      staged[row][at] = rounded<T>(x.x * p.scale);
      staged[row][at + 1] = rounded<T>(x.y * p.scale);
      staged[row + 8][at] = rounded<T>(x.z * p.scale);
      staged[row + 8][at + 1] = rounded<T>(x.w * p.scale);
    }
  }
  __syncthreads();
  int const chunks = p.head_dim / 8;
  for (int i = threadIdx.x; i < kRowsAfter * chunks; i += kHelperThreads) {
    int const row = i / chunks, column = i % chunks * 8;
    if (rows.begin + row >= s.rows_q) break;
    // Of a query that doesn't exist, dS is 0, but perhaps not all keys are numbers.
    bool const exists = rows.begin + row < s.queries;
    (exists ? Chunk<T, 8>::load(&staged[row][column]) : Chunk<T, 8>{})
        .store(static_cast<T*>(p.dq) + rows.offset(p.dq_stride, rows.begin + row) + column);
  }
}

}  // namespace cutlass_fmha
