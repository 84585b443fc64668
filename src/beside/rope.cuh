// Queries and keys between their projections and attention: the norm of each head, rotary embedding, a cache's new
// rows. A thread has both elements of a pair, so that each is read once and rows may be turned in place; threads that
// share a row go on to other heads of its token, with the same angles.
#pragma once

#include "rope_rows.cuh"

namespace cutlass_fmha {

/// What each block does before it reads anything else, once it knows where its rows begin.
template <class... T>
__device__ void begin_rope(RopeParams const& p, T*&... rows) {
  start_dependents();
  wait_with(p.width > 0, rows...);
  count_rows(p.seqused_k, p.cache_seqlens, p.cu_seqlens, p.sequences, p.seqlen);
}

/// Where the rows of a unit go.
struct Destination {
  int64_t offset;  ///< without the head's; -1: they are dropped
  bool zero;       ///< 0 takes their place
};

__device__ inline Destination destination_of(RopeParams const& p, RopeRows const& rows, Unit const& u,
                                             Token const& token, bool cached) {
  if (!u.there) return {-1, false};
  if (cached) return {place_of(p, token, rows.out_stride), false};
  bool const zero = token.sequence < 0;
  int64_t const offset = u.row.batch * rows.out_stride.batch + u.row.position * rows.out_stride.seqlen;
  return {zero && rows.x == rows.out ? -1 : offset, zero};
}

/// What becomes of the pairs of an item: with the norm's weights in the angles' place, an element is multiplied twice.
template <int Width, bool Norm>
struct Factors {
  float aa[Width], ab[Width], ba[Norm ? Width : 1], bb[Norm ? Width : 1];  ///< by both elements, of each

  template <class T>
  __device__ void read(RopeParams const& p, RopeRows const& rows, Runs<Width> const& runs, int position) {
#pragma unroll
    for (int n = 0; n < Width; ++n) aa[n] = 1.f, ab[n] = 0.f;
    if (runs.turned) read_turn<T>(p, runs, position, aa, ab);
    Item<Width> w;
    if constexpr (Norm) w = read_weight<T>(p, rows, runs);
    float const sign = p.inverse ? -1.f : 1.f;
#pragma unroll
    for (int n = 0; n < Width; ++n) {
      ab[n] *= sign;
      if constexpr (Norm) {
        bb[n] = aa[n] * w.b[n];
        ba[n] = ab[n] * w.a[n];
        aa[n] *= w.a[n];
        ab[n] *= w.b[n];
      }
    }
  }

  /// x times these and, of a norm, `scale`.
  __device__ void apply(Item<Width>& x, Runs<Width> const& runs, float scale) const {
    if constexpr (!Norm) {
      if (runs.turned) turn(x, aa, ab);
    } else {
#pragma unroll
      for (int n = 0; n < Width; ++n) {
        float const a = x.a[n] * scale, b = x.b[n] * scale;
        x.a[n] = runs.turned ? fmaf(a, aa[n], -b * ab[n]) : a * aa[n];
        x.b[n] = runs.turned ? fmaf(b, bb[n], a * ba[n]) : b * bb[n];
      }
    }
  }
};

/// Each thread has one item of a row, and kRowsTogether rows on their way at once.
template <class T, int Width, bool Norm>
__device__ void rope_vectors(RopeParams const& p, RopeRows const& rows, RopeBlock const& block) {
  constexpr int kTogether = RopeParams::kRowsTogether;
  uint32_t const unit = uint32_t(block.number) * (kHelperThreads >> rows.lanes_log2) + (threadIdx.x >> rows.lanes_log2);
  int const lanes = 1 << rows.lanes_log2, lane = int(threadIdx.x) & (lanes - 1);
  Unit const u = unit_of(p, rows, unit);
  Runs<Width> const runs(lane, rows, block.part == kValues ? 0 : p.rotary.dim, p.rotary.interleaved);
  bool const has_item = lane < rows.items && u.there;
  T const* from = u.begin(static_cast<T const*>(rows.x), rows.x_stride) + u.row.head * rows.x_stride.head;
  bool const cached = p.cache_seqlens && block.part != kQueries;
  bool const told = cached || p.cu_seqlens || p.positions || p.position.first;  // where they stand is read
  Place at;
  Destination to;
  auto const find = [&] {
    at = place_of(p, u);
    to = destination_of(p, rows, u, at.token, cached);
  };
  if (!told) find();
  begin_rope(p, from);
  int64_t const hop = rows.slots * rows.x_stride.head, out_hop = rows.slots * rows.out_stride.head;
  Packed<T, Width> packed[kTogether];
  auto const load = [&](int n, int step) {
    if (has_item && u.row.head + step * rows.slots < rows.num_heads) packed[n].load(from, runs);
    from += hop;
  };
#pragma unroll
  for (int n = 0; n < kTogether; ++n) load(n, n);  // before anything else that is read: it takes longest
  if (told) find();
  T* out = static_cast<T*>(rows.out) + to.offset + u.row.head * rows.out_stride.head;
  bool written = has_item && to.offset >= 0;
  if (written && to.zero) {
    for (int head = u.row.head; head < rows.num_heads; head += rows.slots, out += out_hop) {
      Packed<T, Width>{}.store(out, runs);
    }
    written = false;
  }
  Factors<Width, Norm> factors;
  if (written) factors.template read<T>(p, rows, runs, at.position);

  for (int step = 0;;) {  // the same for all lanes of a warp
    float scales[kTogether];
    if constexpr (Norm) {
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        packed[n].sort(runs);
        Item<Width> const x = packed[n].read();
        scales[n] = dot(x, x);
        packed[n].settle();
      }
      add_over_lanes(scales, lanes);
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n, out += out_hop) {
      if (!written || u.row.head + (step + n) * rows.slots >= rows.num_heads) continue;  // nor are there any beyond
      if constexpr (Norm) {
        scales[n] = rsqrtf(fmaf(scales[n], p.per_element, p.eps));
      } else {
        packed[n].sort(runs);
      }
      Item<Width> x = packed[n].read();
      factors.apply(x, runs, scales[n]);
      packed[n].write(x);
      packed[n].sort(runs, true);
      packed[n].store(out, runs);
      load(n, step + kTogether + n);
    }
    if ((step += kTogether) >= rows.steps) return;
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
  begin_rope(p);
  Place const at = place_of(p, u);
  Destination const to = destination_of(p, rows, u, at.token, p.cache_seqlens && block.part != kQueries);
  T const* const from = static_cast<T const*>(rows.x) + u.row.offset(rows.x_stride);
  T* const out = static_cast<T*>(rows.out) + to.offset + u.row.head * rows.out_stride.head;
  int const items = to.offset >= 0 ? rows.items : 0;

  bool const norm = p.norm && !is_value;
  float scale[] = {0.f};
  if (norm) {
    for (int item = lane; item < items; item += lanes) {
      Packed<T, 1> packed;
      packed.load(from, Runs<1>(item, rows, dim, p.rotary.interleaved));
      scale[0] += dot(packed.read(), packed.read());
    }
    add_over_lanes(scale, lanes);
    scale[0] = rsqrtf(fmaf(scale[0], p.per_element, p.eps));
  }
  auto const write = [&](auto& factors, Packed<T, 1>& packed, Runs<1> const& runs) {
    factors.template read<T>(p, rows, runs, at.position);
    Item<1> x = packed.read();
    factors.apply(x, runs, scale[0]);
    packed.write(x);
  };
  for (int item = lane; item < items; item += lanes) {
    Runs<1> const runs(item, rows, dim, p.rotary.interleaved);
    Packed<T, 1> packed;
    if (!to.zero) {
      packed.load(from, runs);
      Factors<1, true> normed;
      Factors<1, false> turned;
      norm ? write(normed, packed, runs) : write(turned, packed, runs);
    }
    packed.store(out, runs);
  }
}

template <class T, int Width>
__device__ void rope_by_vectors(RopeParams const& p, RopeRows const& rows, RopeBlock const& block) {
  p.norm&& block.part != kValues ? rope_vectors<T, Width, true>(p, rows, block)
                                 : rope_vectors<T, Width, false>(p, rows, block);
}

template <class T>
__device__ void rope(RopeParams const& p) {
  if (p.alone) start_dependents();
  RopeBlock const block = block_of(p);
  if (block.part == kNoRows) return begin_rope(p);
  RopeRows const& rows = rows_of(p, block.part);
  if (p.width == kWidth<T>) return rope_by_vectors<T, kWidth<T>>(p, rows, block);
  if constexpr (RopeParams::kNarrow < kWidth<T>) {
    if (p.width == RopeParams::kNarrow) return rope_by_vectors<T, RopeParams::kNarrow>(p, rows, block);
  }
  rope_elements<T>(p, rows, block);
}

}  // namespace cutlass_fmha
