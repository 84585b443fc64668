// What the threads of rope.cuh and rope_backward.cuh have of a row and of its token: both elements of each of their
// pairs, the angles of these, and where the rows of a token stand.
#pragma once

#include <cmath>

#include "../helpers/rotary.cuh"
#include "rope_params.h"
#include "rows.cuh"

namespace cutlass_fmha {

/// An item of a row: the runs of Width elements from `a` on, and from `b` on where the row has these. Pair number
/// first + n is, where the item is turned, of a + n and b + n, or of neighbours.
template <int Width>
struct Runs {
  int a, b, first;
  bool turned, has_b, neighbours;

  __device__ Runs(int item, RopeRows const& rows, int dim, bool interleaved)
      : first(item * Width), neighbours(interleaved && Width > 1) {
    turned = first < dim / 2;
    a = turned && !interleaved ? first : 2 * first;
    b = turned && !interleaved ? dim / 2 + first : a + Width;
    has_b = b < rows.head_dim;
  }
  /// Of an element of pair n.
  __device__ int column(int n, bool second) const {
    return neighbours ? a + 2 * n + int(second) : (second ? b : a) + n;
  }
};

/// The elements of an item in fp32, pair by pair; what there is not is 0.
template <int Width>
struct Item {
  float a[Width], b[Width];
};

/// The same in T. Empty at first: what a thread doesn't have counts as 0 in sums.
template <class T, int Width>
struct Packed {
  Chunk<T, Width> a{}, b{};

  __device__ void load(T const* row, Runs<Width> const& runs) {
    a = Chunk<T, Width>::load(row + runs.a);
    b = runs.has_b ? Chunk<T, Width>::load(row + runs.b) : Chunk<T, Width>{};  // a row before may have been sorted
  }
  __device__ static void prefetch(T const* row, Runs<Width> const& runs) {
    prefetch_to_l2(row + runs.a);
    if (runs.has_b) prefetch_to_l2(row + runs.b);
  }
  __device__ void store(T* row, Runs<Width> const& runs) const {
    a.store(row + runs.a);
    if (runs.has_b) b.store(row + runs.b);
  }
  /// From runs to first and second elements of pairs where these are neighbours; or back.
  __device__ void sort(Runs<Width> const& runs, bool back = false) {
    if (!runs.neighbours) return;
    constexpr int kWords = sizeof(a) / 4;  // of both runs twice as many
    uint32_t from[2 * kWords + 1], to[2 * kWords + 1];
    memcpy(from, a.words, sizeof(a));
    memcpy(from + kWords, b.words, sizeof(b));
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      uint32_t const x = from[back ? n : 2 * n], y = from[back ? kWords + n : 2 * n + 1];
      to[back ? 2 * n : n] = sizeof(T) == 2 ? __byte_perm(x, y, 0x5410) : x;
      to[back ? 2 * n + 1 : kWords + n] = sizeof(T) == 2 ? __byte_perm(x, y, 0x7632) : y;
    }
    memcpy(a.words, to, sizeof(a));
    memcpy(b.words, to + kWords, sizeof(b));
  }
  __device__ Item<Width> read() const {
    Item<Width> x;
    cutlass_fmha::read(a, x.a);
    cutlass_fmha::read(b, x.b);
    return x;
  }
  __device__ void write(Item<Width> const& x) {
    a.write(x.a);
    b.write(x.b);
  }
  /// Keeps the compiler from having made floats of it before: registers are for rows on their way.
  __device__ void settle() {
    packed(a);
    packed(b);
  }
};

/// sum x y, or sum x y w
template <int Width>
__device__ float dot(Item<Width> const& x, Item<Width> const& y) {
  float of_a = 0.f, of_b = 0.f;
#pragma unroll
  for (int n = 0; n < Width; ++n) of_a = fmaf(x.a[n], y.a[n], of_a), of_b = fmaf(x.b[n], y.b[n], of_b);
  return of_a + of_b;
}
template <int Width>
__device__ float dot(Item<Width> const& x, Item<Width> const& y, Item<Width> const& w) {
  float of_a = 0.f, of_b = 0.f;
#pragma unroll
  for (int n = 0; n < Width; ++n) {
    of_a = fmaf(x.a[n] * y.a[n], w.a[n], of_a);
    of_b = fmaf(x.b[n] * y.b[n], w.b[n], of_b);
  }
  return of_a + of_b;
}

/// Each sum becomes that of the threads that share a row, all of them in step.
template <int Count>
__device__ void add_over_lanes(float (&sums)[Count], int lanes) {
  for (int other = lanes / 2; other > 0; other /= 2) {
#pragma unroll
    for (int n = 0; n < Count; ++n) sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], other);
  }
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

/// cos and sin of the pairs of an item that is turned, before p.inverse counts: nothing waits here for a table of
/// floats.
template <class T, int Width>
__device__ void read_turn(RopeParams const& p, Runs<Width> const& runs, int position, float (&cos)[Width],
                          float (&sin)[Width]) {
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
}

/// Each pair (x, y) becomes (x cos - y sin, x sin + y cos); back: with -sin.
template <bool Back = false, int Width>
__device__ void turn(Item<Width>& x, float const (&cos)[Width], float const (&sin)[Width]) {
#pragma unroll
  for (int n = 0; n < Width; ++n) {
    float const a = x.a[n], b = x.b[n], of_a = (Back ? -a : a) * sin[n], of_b = (Back ? b : -b) * sin[n];
    x.a[n] = fmaf(a, cos[n], of_b);
    x.b[n] = fmaf(b, cos[n], of_a);
  }
}

/// A norm's factors of an item's elements.
template <class T, int Width>
__device__ Item<Width> read_weight(RopeParams const& p, RopeRows const& rows, Runs<Width> const& runs) {
  Item<Width> w;
#pragma unroll
  for (int n = 0; n < Width; ++n) w.a[n] = w.b[n] = 1.f;
  if (!rows.weight) return w;
  auto const as = [&](auto const* weight) {
    Packed<std::remove_const_t<std::remove_reference_t<decltype(*weight)>>, Width> packed;
    packed.load(weight, runs);
    packed.sort(runs);
    w = packed.read();
  };
  rows.weight_float32 ? as(static_cast<float const*>(rows.weight)) : as(static_cast<T const*>(rows.weight));
#pragma unroll
  for (int n = 0; n < Width; ++n) w.a[n] += p.weight_offset, w.b[n] += p.weight_offset;
  return w;
}

/// The rows of some heads of a token.
struct Unit {
  bool there;  ///< whether there is such a token
  Row row;     ///< with the first head

  /// Where the token's heads begin.
  template <class T>
  __device__ T* begin(T* tensor, Strides const& s) const {
    return tensor + (row.batch * s.batch + row.position * s.seqlen);
  }
};

__device__ inline Unit unit_of(RopeParams const& p, RopeRows const& rows, uint32_t number) {
  bool const there = number < uint32_t(rows.units);
  return {there, row_of(there ? int(number) : 0, rows.by_slots, rows.slots, p.by_seqlen, p.seqlen)};
}

/// A unit's token, of no sequence where there is none, and the position of its angles.
struct Place {
  Token token;
  int position;
};

__device__ inline Place place_of(RopeParams const& p, Unit const& u) {
  Place at{token_of(p.cu_seqlens, p.cu_seqlens ? p.sequences : 1, u.row), 0};
  if (!u.there) at.token.sequence = -1;
  if (at.token.sequence < 0) return at;
  at.position = p.positions ? p.positions[u.row.batch * p.positions_stride[0] + u.row.position * p.positions_stride[1]]
                            : p.start + at.token.position +
                                  (p.position.first ? first_position(p.position, at.token.sequence) : 0);
  return at;
}

/// Which rows a block has, and which of these.
enum RopePart { kQueries, kKeys, kValues, kNoRows };

struct RopeBlock {
  RopePart part;
  int number;
};

/// Blocks of queries and of keys take turns, so that a token's angles are read by all at about the same time.
__device__ inline RopeBlock block_of(RopeParams const& p) {
  uint32_t const n = blockIdx.x;
  if (n >= uint32_t(p.q.blocks + p.k.blocks)) {
    int const rest = int(n) - p.q.blocks - p.k.blocks;
    return {rest < p.v.blocks ? kValues : kNoRows, rest};
  }
  if (p.keys_share == 0) return {p.q.blocks > 0 ? kQueries : kKeys, int(n)};
  uint32_t const keys = __umulhi(n, p.keys_share);  // of blocks before this one
  return __umulhi(n + 1, p.keys_share) > keys ? RopeBlock{kKeys, int(keys)} : RopeBlock{kQueries, int(n - keys)};
}

__device__ inline RopeRows const& rows_of(RopeParams const& p, RopePart part) {
  return part == kQueries ? p.q : part == kKeys ? p.k : p.v;
}

}  // namespace cutlass_fmha
