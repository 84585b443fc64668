// Queries and keys between their projections and attention: the norm of each head, rotary embedding, a cache's new
// rows; and the gradients of that. A thread has both elements of a pair, so that each is read once and rows may be
// turned in place; threads that share a row go on to other heads of its token, with the same angles.
#pragma once

#include <cmath>

#include "../helpers/rotary.cuh"
#include "rope_params.h"

namespace cutlass_fmha {

/// The runs of an item: Width elements from `a` on, and from `b` on where the row has these. Pair number first + n is,
/// where the item is turned, of a + n and b + n, or of neighbours.
template <int Width>
struct Runs {
  int a, b, first;
  bool turned, has_b;

  __device__ Runs(int item, RopeRows const& rows, int dim, bool interleaved) : first(item * Width) {
    turned = first < dim / 2;
    if (turned && !interleaved) {
      a = first;
      b = dim / 2 + first;
    } else {
      a = 2 * first;
      b = a + Width;
    }
    has_b = b < rows.head_dim;
  }
};

/// The elements of an item in fp32; what there is not is 0.
template <int Width>
struct Item {
  float a[Width], b[Width];
};

template <class T, int Width>
struct Packed {
  Chunk<T, Width> a, b;

  __device__ void load(T const* row, Runs<Width> const& runs) {
    a = Chunk<T, Width>::load(row + runs.a);
    if (runs.has_b) b = Chunk<T, Width>::load(row + runs.b);
  }
  __device__ Item<Width> read(Runs<Width> const& runs) const {
    Item<Width> x;
    a.read(x.a);
    b.read(x.b);
    if (!runs.has_b) {
#pragma unroll
      for (int n = 0; n < Width; ++n) x.b[n] = 0.f;
    }
    return x;
  }
};

template <class T, int Width>
__device__ void store(T* row, Runs<Width> const& runs, Item<Width> const& x) {
  Chunk<T, Width> chunk;
  chunk.write(x.a);
  chunk.store(row + runs.a);
  if (!runs.has_b) return;
  chunk.write(x.b);
  chunk.store(row + runs.b);
}

template <int Width>
__device__ float dot(Item<Width> const& x, Item<Width> const& y) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < Width; ++n) sum = fmaf(x.a[n], y.a[n], fmaf(x.b[n], y.b[n], sum));
  return sum;
}

/// Of the threads that share a row.
__device__ inline float sum_over_lanes(float x, int lanes) {
  for (int n = lanes / 2; n > 0; n /= 2) x += __shfl_xor_sync(0xffffffffu, x, n);
  return x;
}

/// sin and cos of an angle below 2^24: what is left beyond a multiple of pi / 2, which three floats hold, into Taylor's
/// series. (The compiler's own are too coarse for large angles with --use_fast_math.)
__device__ inline void sin_and_cos(float angle, float& sin, float& cos) {
  float const quarters = rintf(__fmul_rn(angle, 0.636619772f));
  float x = fmaf(quarters, -1.57079637f, angle);
  x = fmaf(quarters, 4.37113883e-8f, x);
  x = fmaf(quarters, 1.71512451e-15f, x);
  float const y = x * x;
  float const s =
      fmaf(x * y, fmaf(y, fmaf(y, fmaf(y, 2.75573192e-6f, -1.98412698e-4f), 8.33333333e-3f), -1.66666667e-1f), x);
  float const c = fmaf(
      y, fmaf(y, fmaf(y, fmaf(y, fmaf(y, -2.75573192e-7f, 2.48015873e-5f), -1.38888889e-3f), 4.16666667e-2f), -0.5f),
      1.f);
  int const n = int(quarters);
  sin = n & 1 ? c : s;
  cos = n & 1 ? s : c;
  if (n & 2) sin = -sin;
  if ((n + 1) & 2) cos = -cos;
}

/// Of the pairs of an item.
template <int Width>
struct Turn {
  float cos[Width], sin[Width];

  template <class T>
  __device__ void read(RopeParams const& p, Runs<Width> const& runs, int position) {
    if (p.inv_freq) {
      Chunk<float, Width>::load(p.inv_freq + runs.first).read(cos);
#pragma unroll
      for (int n = 0; n < Width; ++n) sin_and_cos(__fmul_rn(float(position), cos[n]), sin[n], cos[n]);
    } else if (unsigned(position) < unsigned(p.rotary.positions)) {
      read_angles<T>(p.rotary.cos, p.rotary.float32, position * p.rotary.cos_stride + runs.first, cos);
      read_angles<T>(p.rotary.sin, p.rotary.float32, position * p.rotary.sin_stride + runs.first, sin);
    } else {
#pragma unroll
      for (int n = 0; n < Width; ++n) cos[n] = sin[n] = NAN;
    }
    if (p.inverse) {
#pragma unroll
      for (int n = 0; n < Width; ++n) sin[n] = -sin[n];
    }
  }

  __device__ static void turn(float& x, float& y, float cos, float sin) {
    float const first = x;
    x = fmaf(x, cos, -y * sin);
    y = fmaf(y, cos, first * sin);
  }

  __device__ void apply(Item<Width>& x, bool interleaved) const {
    if (Width == 1 || !interleaved) {
#pragma unroll
      for (int n = 0; n < Width; ++n) turn(x.a[n], x.b[n], cos[n], sin[n]);
    } else if constexpr (Width > 1) {
#pragma unroll
      for (int n = 0; n < Width; n += 2) {
        turn(x.a[n], x.a[n + 1], cos[n / 2], sin[n / 2]);
        turn(x.b[n], x.b[n + 1], cos[(Width + n) / 2], sin[(Width + n) / 2]);
      }
    }
  }
};

/// A norm's factors of an item's elements.
template <class T, int Width>
__device__ Item<Width> read_weight(RopeParams const& p, RopeRows const& rows, Runs<Width> const& runs) {
  Item<Width> w;
#pragma unroll
  for (int n = 0; n < Width; ++n) w.a[n] = w.b[n] = 1.f;
  if (!rows.weight) return w;
  read_angles<T>(rows.weight, rows.weight_float32, runs.a, w.a);
  if (runs.has_b) read_angles<T>(rows.weight, rows.weight_float32, runs.b, w.b);
#pragma unroll
  for (int n = 0; n < Width; ++n) {
    w.a[n] += p.weight_offset;
    w.b[n] += p.weight_offset;
  }
  return w;
}

/// The rows of some heads of a token.
struct Unit {
  bool there;    ///< whether there is such a token
  Row row;       ///< with the first head
  Token token;   ///< of no sequence where there is none
  int position;  ///< that of its angles
};

__device__ inline Unit unit_of(RopeParams const& p, RopeRows const& rows, uint32_t number) {
  Unit u;
  u.there = number < uint32_t(rows.units);
  u.row = row_of(u.there ? int(number) : 0, rows.by_slots, rows.slots, p.by_seqlen, p.seqlen);
  u.token = token_of(p.cu_seqlens, p.cu_seqlens ? p.sequences : 1, u.row);
  if (!u.there) u.token.sequence = -1;
  u.position = 0;
  if (u.token.sequence < 0) return u;
  u.position = p.positions
                   ? p.positions[u.row.batch * p.positions_stride[0] + u.row.position * p.positions_stride[1]]
                   : p.start + u.token.position + (p.position.first ? first_position(p.position, u.token.sequence) : 0);
  return u;
}

/// Where the rows of a unit go.
struct Destination {
  int64_t offset;  ///< without the head's; -1: they are dropped
  bool zero;       ///< 0 takes their place
};

__device__ inline Destination destination_of(RopeParams const& p, RopeRows const& rows, Unit const& u, bool cached) {
  if (!u.there) return {-1, false};
  if (cached) return {place_of(p, u.token, rows.out_stride), false};
  bool const zero = u.token.sequence < 0;
  int64_t const offset = u.row.batch * rows.out_stride.batch + u.row.position * rows.out_stride.seqlen;
  return {zero && rows.x == rows.out ? -1 : offset, zero};
}

/// Which rows a block has, and which of these.
enum RopePart { kQueries, kKeys, kValues, kNoRows };

struct RopeBlock {
  RopePart part;
  int number;
};

__device__ inline RopeBlock block_of(RopeParams const& p) {
  int n = blockIdx.x;
  if (n < p.q.blocks) return {kQueries, n};
  if ((n -= p.q.blocks) < p.k.blocks) return {kKeys, n};
  if ((n -= p.k.blocks) < p.v.blocks) return {kValues, n};
  return {kNoRows, 0};
}

__device__ inline RopeRows const& rows_of(RopeParams const& p, RopePart part) {
  return part == kQueries ? p.q : part == kKeys ? p.k : p.v;
}

/// Each thread has one item of a row, and several rows in flight.
template <class T>
__device__ void rope_vectors(RopeParams const& p, RopeRows const& rows, RopeBlock const& block) {
  constexpr int Width = RopeParams::kWidth, kRowsTogether = 8 / int(sizeof(T));
  uint32_t const unit = uint32_t(block.number) * (kHelperThreads >> rows.lanes_log2) + (threadIdx.x >> rows.lanes_log2);
  int const lanes = 1 << rows.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
  bool const is_value = block.part == kValues, norm = p.norm && !is_value;
  int const dim = is_value ? 0 : p.rotary.dim;
  Unit const u = unit_of(p, rows, unit);
  Destination const to = destination_of(p, rows, u, p.cache_seqlens && block.part != kQueries);
  Runs<Width> const runs(lane, rows, dim, p.rotary.interleaved);
  bool const has_item = lane < rows.items && to.offset >= 0;
  Turn<Width> turn;
  if (has_item && runs.turned && !to.zero) turn.template read<T>(p, runs, u.position);
  T const* const from =
      static_cast<T const*>(rows.x) + u.row.batch * rows.x_stride.batch + u.row.position * rows.x_stride.seqlen;
  T* const out = static_cast<T*>(rows.out) + to.offset;

  for (int step = 0; step < rows.steps; step += kRowsTogether) {  // the same for all lanes of a warp
    Packed<T, Width> packed[kRowsTogether];
    int const head = u.row.head + step * rows.slots;
#pragma unroll
    for (int n = 0; n < kRowsTogether; ++n) {
      int const own = head + n * rows.slots;
      if (has_item && own < rows.num_heads) packed[n].load(from + own * rows.x_stride.head, runs);
    }
#pragma unroll
    for (int n = 0; n < kRowsTogether; ++n) {
      if (n > 0 && step + n >= rows.steps) break;
      int const own = head + n * rows.slots;
      bool const mine = has_item && own < rows.num_heads;
      Item<Width> x = packed[n].read(runs);
      if (norm) {
        float const squares = sum_over_lanes(mine ? dot(x, x) : 0.f, lanes);
        float const factor = rsqrtf(fmaf(squares, p.per_element, p.eps));
        if (mine) {
          Item<Width> const w = read_weight<T>(p, rows, runs);
#pragma unroll
          for (int i = 0; i < Width; ++i) {
            x.a[i] *= factor * w.a[i];
            x.b[i] *= factor * w.b[i];
          }
        }
      }
      if (!mine) continue;
      if (to.zero) x = Item<Width>{};
      if (runs.turned && !to.zero) turn.apply(x, p.rotary.interleaved);
      store(out + own * rows.out_stride.head, runs, x);
    }
  }
}

/// Threads that share a row have an element of a run each, and several items. One row at a time.
template <class T>
__device__ void rope_elements(RopeParams const& p, RopeRows const& rows, RopeBlock const& block) {
  uint32_t const unit = uint32_t(block.number) * (kHelperThreads >> rows.lanes_log2) + (threadIdx.x >> rows.lanes_log2);
  int const lanes = 1 << rows.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
  bool const is_value = block.part == kValues;
  int const dim = is_value ? 0 : p.rotary.dim;
  Unit const u = unit_of(p, rows, unit);
  Destination const to = destination_of(p, rows, u, p.cache_seqlens && block.part != kQueries);
  T const* const from = static_cast<T const*>(rows.x) + u.row.offset(rows.x_stride);
  T* const out = static_cast<T*>(rows.out) + to.offset + u.row.head * rows.out_stride.head;
  int const items = to.offset >= 0 ? rows.items : 0;

  float factor = 1.f;
  if (p.norm && !is_value) {
    float squares = 0.f;
    for (int item = lane; item < items; item += lanes) {
      Runs<1> const runs(item, rows, dim, p.rotary.interleaved);
      Packed<T, 1> packed;
      packed.load(from, runs);
      Item<1> const x = packed.read(runs);
      squares += dot(x, x);
    }
    factor = rsqrtf(fmaf(sum_over_lanes(squares, lanes), p.per_element, p.eps));
  }
  for (int item = lane; item < items; item += lanes) {
    Runs<1> const runs(item, rows, dim, p.rotary.interleaved);
    Packed<T, 1> packed;
    packed.load(from, runs);
    Item<1> x = packed.read(runs);
    if (p.norm && !is_value) {
      Item<1> const w = read_weight<T>(p, rows, runs);
      x.a[0] *= factor * w.a[0];
      x.b[0] *= factor * w.b[0];
    }
    if (to.zero) {
      x = Item<1>{};
    } else if (runs.turned) {
      Turn<1> turn;
      turn.template read<T>(p, runs, u.position);
      turn.apply(x, p.rotary.interleaved);
    }
    store(out, runs, x);
  }
}

template <class T>
__device__ void rope(RopeParams const& p) {
  count_rows(p.seqused_k, p.cache_seqlens, p.cu_seqlens, p.sequences, p.seqlen);
  RopeBlock const block = block_of(p);
  if (block.part == kNoRows) return;
  RopeRows const& rows = rows_of(p, block.part);
  if (p.vectors) {
    rope_vectors<T>(p, rows, block);
  } else {
    rope_elements<T>(p, rows, block);
  }
}

// ---- gradients -----------------------------------------------------------------------------------------------------

/// With n = x / |x| (|x|: the root of mean x^2 + eps) and g the gradient of n w, turned back from what came in: of x,
/// (g w - n mean(g w n)) / |x|, which becomes g; of w, g n, which is added to `sums`. `squares`, `product`: of the row.
template <int Width>
__device__ void norm_gradient(Item<Width> const& x, Item<Width>& g, Item<Width> const& w, float squares, float product,
                              float per_element, float eps, Item<Width>& sums) {
  float const factor = rsqrtf(fmaf(squares, per_element, eps));
  float const mean = product * per_element * factor;
  auto const one = [&](float x, float& g, float w, float& sum) {
    float const n = x * factor;
    sum = fmaf(g, n, sum);
    g = factor * fmaf(g, w, -n * mean);
  };
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    one(x.a[i], g.a[i], w.a[i], sums.a[i]);
    one(x.b[i], g.b[i], w.b[i], sums.b[i]);
  }
}

/// sum g w x of an item
template <int Width>
__device__ float dot(Item<Width> const& x, Item<Width> const& g, Item<Width> const& w) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < Width; ++n) sum = fmaf(x.a[n] * g.a[n], w.a[n], fmaf(x.b[n] * g.b[n], w.b[n], sum));
  return sum;
}

/// A block walks tokens, a step of which is as far as all blocks have threads. Each thread has one item of a row.
template <class T>
__device__ void rope_backward_vectors(RopeParams const& p, RopeRows const& rows, int block) {
  constexpr int Width = RopeBackwardParams::kWidthOf<sizeof(T)>, kRowsTogether = 1;
  __shared__ float sums_of[2 * Width][kHelperThreads];
  int const lanes = 1 << rows.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
  int const groups = kHelperThreads >> rows.lanes_log2;
  Runs<Width> const runs(lane, rows, p.rotary.dim, p.rotary.interleaved);
  bool const is_item = lane < rows.items;
  Item<Width> w{}, sums{};
  if (is_item) w = read_weight<T>(p, rows, runs);
  for (uint32_t first = block * groups; first < uint32_t(rows.units); first += rows.blocks * groups) {
    Unit const u = unit_of(p, rows, first + (threadIdx.x >> rows.lanes_log2));
    bool const has_item = is_item && u.there, zero = u.token.sequence < 0;
    Turn<Width> turn;
    if (has_item && runs.turned && !zero) turn.template read<T>(p, runs, u.position);
    T const* const from =
        static_cast<T const*>(rows.x) + u.row.batch * rows.x_stride.batch + u.row.position * rows.x_stride.seqlen;
    T const* const gradient = static_cast<T const*>(rows.gradient) + u.row.batch * rows.gradient_stride.batch +
                              u.row.position * rows.gradient_stride.seqlen;
    T* const out =
        static_cast<T*>(rows.out) + u.row.batch * rows.out_stride.batch + u.row.position * rows.out_stride.seqlen;
    for (int step = 0; step < rows.steps; step += kRowsTogether) {
      Packed<T, Width> packed_x[kRowsTogether], packed_g[kRowsTogether];
      int const head = u.row.head + step * rows.slots;
#pragma unroll
      for (int n = 0; n < kRowsTogether; ++n) {
        int const own = head + n * rows.slots;
        if (!has_item || own >= rows.num_heads) continue;
        packed_x[n].load(from + own * rows.x_stride.head, runs);
        packed_g[n].load(gradient + own * rows.gradient_stride.head, runs);
      }
#pragma unroll
      for (int n = 0; n < kRowsTogether; ++n) {
        if (n > 0 && step + n >= rows.steps) break;
        int const own = head + n * rows.slots;
        bool const mine = has_item && own < rows.num_heads;
        Item<Width> x{}, g{};
        if (mine && !zero) {
          x = packed_x[n].read(runs);
          g = packed_g[n].read(runs);
          if (runs.turned) turn.apply(g, p.rotary.interleaved);
        }
        float const squares = sum_over_lanes(dot(x, x), lanes), product = sum_over_lanes(dot(x, g, w), lanes);
        if (!mine) continue;
        if (!zero) norm_gradient(x, g, w, squares, product, p.per_element, p.eps, sums);
        store(out + own * rows.out_stride.head, runs, g);
      }
    }
  }
  if (!rows.partial) return;
#pragma unroll
  for (int n = 0; n < Width; ++n) {
    sums_of[n][threadIdx.x] = sums.a[n];
    sums_of[Width + n][threadIdx.x] = sums.b[n];
  }
  __syncthreads();
  if (threadIdx.x >= lanes || !is_item) return;
  for (int n = 0; n < 2 * Width; ++n) {
    float sum = 0.f;
    for (int thread = lane; thread < kHelperThreads; thread += lanes) sum += sums_of[n][thread];
    int const column = n < Width ? runs.a + n : runs.b + n - Width;
    if (n < Width || runs.has_b) rows.partial[int64_t(block) * rows.head_dim + column] = sum;
  }
}

/// Each warp walks rows, and adds what becomes of the weight's gradient to a part of its own.
template <class T>
__device__ void rope_backward_elements(RopeParams const& p, RopeRows const& rows, int block) {
  constexpr int kLanes = 32;
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
    float squares = 0.f, product = 0.f;
    for (int pass = 0; pass < 2; ++pass) {
      for (int item = lane; item < rows.items; item += kLanes) {
        Runs<1> const runs(item, rows, p.rotary.dim, p.rotary.interleaved);
        Packed<T, 1> packed_x, packed_g;
        packed_x.load(from, runs);
        packed_g.load(gradient, runs);
        Item<1> const x = packed_x.read(runs), w = read_weight<T>(p, rows, runs);
        Item<1> g = packed_g.read(runs), sums{};
        if (runs.turned) {
          Turn<1> turn;
          turn.template read<T>(p, runs, u.position);
          turn.apply(g, p.rotary.interleaved);
        }
        if (pass == 0) {
          squares += dot(x, x);
          product += dot(x, g, w);
          continue;
        }
        if (u.token.sequence < 0) {
          g = Item<1>{};
        } else {
          norm_gradient(x, g, w, squares, product, p.per_element, p.eps, sums);
        }
        store(out, runs, g);
        if (!partial) continue;
        partial[runs.a] += sums.a[0];
        if (runs.has_b) partial[runs.b] += sums.b[0];
      }
      if (pass == 0) {
        squares = sum_over_lanes(squares, kLanes);
        product = sum_over_lanes(product, kLanes);
      }
    }
  }
}

template <class T>
__device__ void rope_backward(RopeBackwardParams const& p) {
  RopeBlock const block = block_of(p);
  RopeRows const& rows = rows_of(p, block.part);
  if (p.vectors) {
    rope_backward_vectors<T>(p, rows, block.number);
  } else {
    rope_backward_elements<T>(p, rows, block.number);
  }
}

/// The parts of a weight's gradient become it. A block has some columns of q's or of k's; its threads divide the parts.
template <class T>
__device__ void rope_weights(RopeBackwardParams const& p) {
  constexpr int kColumns = RopeBackwardParams::kColumns, kStrips = kHelperThreads / kColumns;
  __shared__ float sums[kStrips][kColumns];
  RopeRows const& rows = blockIdx.y == 0 ? p.q : p.k;
  if (!rows.partial) return;
  int const own = threadIdx.x % kColumns, strip = threadIdx.x / kColumns, column = blockIdx.x * kColumns + own;
  float sum = 0.f;
  if (column < rows.head_dim) {
#pragma unroll 8
    for (int part = strip; part < rows.parts; part += kStrips)
      sum += rows.partial[int64_t(part) * rows.head_dim + column];
  }
  sums[strip][own] = sum;
  __syncthreads();
  if (strip > 0 || column >= rows.head_dim) return;
  for (int n = 1; n < kStrips; ++n) sum += sums[n][own];
  if (rows.weight_float32) {
    static_cast<float*>(rows.weight_gradient)[column] = sum;
  } else {
    static_cast<T*>(rows.weight_gradient)[column] = rounded<T>(sum);
  }
}

}  // namespace cutlass_fmha
