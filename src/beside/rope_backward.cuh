// The gradients of rope.cuh's norms and turns.
#pragma once

#include "rope_rows.cuh"

namespace cutlass_fmha {

/// With n = x / |x| (|x|: the root of mean x^2 + eps) and g the gradient of n w, turned back from what came in: of x,
/// (g w - n mean(g w n)) / |x|, which becomes g; of w, g n, which is added to `sums`. `of_row`: x^2 and g w x of the
/// row.
template <int Width>
__device__ void norm_gradient(Item<Width> const& x, Item<Width>& g, Item<Width> const& w, float const (&of_row)[2],
                              RopeParams const& p, Item<Width>& sums) {
  float const factor = rsqrtf(fmaf(of_row[0], p.per_element, p.eps));
  float const slope = factor * (of_row[1] * p.per_element * factor) * factor;
  auto const one = [&](float x, float& g, float w, float& sum) {
    g *= factor;
    sum = fmaf(g, x, sum);
    g = fmaf(g, w, -x * slope);
  };
#pragma unroll
  for (int n = 0; n < Width; ++n) {
    one(x.a[n], g.a[n], w.a[n], sums.a[n]);
    one(x.b[n], g.b[n], w.b[n], sums.b[n]);
  }
}

/// A block walks tokens, a step of which is as far as all blocks have threads. Each thread has one item of a row; the
/// next row is on its way while one is computed.
template <class T, int Width>
__device__ void rope_backward_vectors(RopeParams const& p, RopeRows const& rows, int block) {
  constexpr int kWarps = kHelperThreads / 32;
  __shared__ float shared[kWarps][32 * 2 * Width];
  int const lanes = 1 << rows.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
  int const groups = kHelperThreads >> rows.lanes_log2;
  uint32_t const turn_of_blocks = rows.blocks * groups;
  Runs<Width> const runs(lane, rows, p.rotary.dim, p.rotary.interleaved);
  bool const is_item = lane < rows.items;
  Item<Width> w{}, sums{};
  int64_t const hop = rows.slots * rows.x_stride.head, gradient_hop = rows.slots * rows.gradient_stride.head,
                out_hop = rows.slots * rows.out_stride.head;

  uint32_t first = block * groups, number = first + (threadIdx.x >> rows.lanes_log2);
  Unit u = unit_of(p, rows, number);
  T const *from, *gradient;
  Packed<T, Width> packed_x, packed_g;
  auto const load = [&](int head) {
    if (!is_item || !u.there || head >= rows.num_heads) return;
    packed_x.load(from, runs);
    packed_g.load(gradient, runs);
  };
  auto const find = [&] {
    from = u.begin(static_cast<T const*>(rows.x), rows.x_stride) + u.row.head * rows.x_stride.head;
    gradient =
        u.begin(static_cast<T const*>(rows.gradient), rows.gradient_stride) + u.row.head * rows.gradient_stride.head;
  };
  find();
  auto const prefetch = [&] {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (!is_item || !u.there || u.row.head + n * rows.slots >= rows.num_heads) continue;
      Packed<T, Width>::prefetch(from + n * hop, runs);
      Packed<T, Width>::prefetch(gradient + n * gradient_hop, runs);
    }
  };
  start_dependents();
  wait_prefetching(p.width > 0, p.early, prefetch, from, gradient);
  load(u.row.head);
  if (is_item) w = read_weight<T>(p, rows, runs);
  for (; first < uint32_t(rows.units); first += turn_of_blocks) {
    Place const at = place_of(p, u);
    bool const has_item = is_item && u.there, zero = at.token.sequence < 0, turned = has_item && runs.turned && !zero;
    float cos[Width], sin[Width];
    if (turned) read_turn<T>(p, runs, at.position, cos, sin);
    T* out = u.begin(static_cast<T*>(rows.out), rows.out_stride) + u.row.head * rows.out_stride.head;
    int head = u.row.head;
    for (int step = 0; step < rows.steps; ++step, out += out_hop) {
      bool const mine = has_item && head < rows.num_heads;
      packed_x.sort(runs);
      packed_g.sort(runs);
      Item<Width> const x = packed_x.read();
      Item<Width> g = packed_g.read();
      head += rows.slots;
      if (step + 1 < rows.steps) {
        from += hop;
        gradient += gradient_hop;
        load(head);
      } else {
        u = unit_of(p, rows, number += turn_of_blocks);
        find();
        load(u.row.head);
      }
      if (turned) turn<true>(g, cos, sin);
      float of_row[] = {dot(x, x), dot(x, g, w)};
      add_over_lanes(of_row, lanes);
      if (!mine) continue;
      Packed<T, Width> packed;
      if (!zero) {
        norm_gradient(x, g, w, of_row, p, sums);
        packed.write(g);
        packed.sort(runs, true);
      }
      packed.store(out, runs);
    }
  }
  if (!rows.partial) return;
  for (int other = lanes; other < 32; other *= 2) {  // the rows of a warp, in a fixed order
#pragma unroll
    for (int n = 0; n < Width; ++n) {
      sums.a[n] += __shfl_xor_sync(0xffffffffu, sums.a[n], other);
      sums.b[n] += __shfl_xor_sync(0xffffffffu, sums.b[n], other);
    }
  }
  if (is_item && threadIdx.x % 32 < lanes) {
#pragma unroll
    for (int n = 0; n < Width; ++n) {
      shared[threadIdx.x / 32][runs.column(n, false)] = sums.a[n];
      shared[threadIdx.x / 32][runs.column(n, true)] = sums.b[n];
    }
  }
  __syncthreads();
  for (int column = threadIdx.x; column < rows.head_dim; column += kHelperThreads) {
    float sum = 0.f;
    for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp][column];
    rows.partial[int64_t(block) * rows.head_dim + column] = sum;
  }
}

/// Each warp walks rows, and adds what becomes of the weight's gradient to a part of its own.
template <class T>
__device__ void rope_backward_elements(RopeParams const& p, RopeRows const& rows, int block) {
  constexpr int kLanes = 32;
  start_dependents();
  wait_for_kernels_ahead();
  int const lane = threadIdx.x % kLanes, warp = block * (kHelperThreads / kLanes) + threadIdx.x / kLanes;
  if (warp >= rows.parts) return;
  float* const partial = rows.partial ? rows.partial + int64_t(warp) * rows.head_dim : nullptr;
  for (int column = lane; partial && column < rows.head_dim; column += kLanes) partial[column] = 0.f;
  __syncwarp();
  for (uint32_t number = warp; number < uint32_t(rows.units); number += rows.parts) {
    Unit const u = unit_of(p, rows, number);
    T const* const from = static_cast<T const*>(rows.x) + u.row.offset(rows.x_stride);
    T const* const gradient = static_cast<T const*>(rows.gradient) + u.row.offset(rows.gradient_stride);
    T* const out = static_cast<T*>(rows.out) + u.row.offset(rows.out_stride);
    Place const at = place_of(p, u);
    float of_row[] = {0.f, 0.f};
    for (int pass = 0; pass < 2; ++pass) {
      for (int item = lane; item < rows.items; item += kLanes) {
        Runs<1> const runs(item, rows, p.rotary.dim, p.rotary.interleaved);
        Packed<T, 1> packed_x, packed_g;
        packed_x.load(from, runs);
        packed_g.load(gradient, runs);
        Item<1> const x = packed_x.read(), w = read_weight<T>(p, rows, runs);
        Item<1> g = packed_g.read(), sums{};
        if (runs.turned) {
          float cos[1], sin[1];
          read_turn<T>(p, runs, at.position, cos, sin);
          turn<true>(g, cos, sin);
        }
        if (pass == 0) {
          of_row[0] += dot(x, x);
          of_row[1] += dot(x, g, w);
          continue;
        }
        if (at.token.sequence < 0) {
          g = Item<1>{};
        } else {
          norm_gradient(x, g, w, of_row, p, sums);
        }
        packed_g.write(g);
        packed_g.store(out, runs);
        if (!partial) continue;
        partial[runs.a] += sums.a[0];
        if (runs.has_b) partial[runs.b] += sums.b[0];
      }
      if (pass == 0) add_over_lanes(of_row, kLanes);
    }
  }
}

template <class T>
__device__ void rope_backward(RopeBackwardParams const& p) {
  RopeBlock const block = block_of(p);
  RopeRows const& rows = rows_of(p, block.part);
  if (p.width == kWidth<T>) return rope_backward_vectors<T, kWidth<T>>(p, rows, block.number);
  if constexpr (RopeParams::kNarrow < kWidth<T>) {
    if (p.width == RopeParams::kNarrow) return rope_backward_vectors<T, RopeParams::kNarrow>(p, rows, block.number);
  }
  rope_backward_elements<T>(p, rows, block.number);
}

/// The parts of a weight's gradient become it. A block has some columns of q's or of k's; its threads divide the parts.
template <class T>
__device__ void rope_weights(RopeBackwardParams const& p) {
  start_dependents();
  constexpr int kColumns = RopeBackwardParams::kColumns, kStrips = kHelperThreads / kColumns;
  __shared__ float shared[kHelperThreads / 32][kColumns];
  RopeRows const& rows = blockIdx.y == 0 ? p.q : p.k;
  if (!rows.partial) return;
  wait_for_kernels_ahead();
  int const own = threadIdx.x % kColumns, strip = threadIdx.x / kColumns, column = blockIdx.x * kColumns + own;
  float sum = 0.f;
  if (column < rows.head_dim) {
#pragma unroll 16
    for (int part = strip; part < rows.parts; part += kStrips)
      sum += rows.partial[int64_t(part) * rows.head_dim + column];
  }
#pragma unroll
  for (int other = kColumns; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (threadIdx.x % 32 < kColumns) shared[threadIdx.x / 32][own] = sum;
  __syncthreads();
  if (strip > 0 || column >= rows.head_dim) return;
  for (int n = 1; n < kHelperThreads / 32; ++n) sum += shared[n][own];
  if (rows.weight_float32) {
    static_cast<float*>(rows.weight_gradient)[column] = sum;
  } else {
    static_cast<T*>(rows.weight_gradient)[column] = rounded<T>(sum);
  }
}

}  // namespace cutlass_fmha
