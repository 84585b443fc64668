// What a thread block of a row with features works on, and the tile of its queries.
#pragma once

#include "loader.cuh"
#include "scores.cuh"

namespace cutlass_fmha {

/// What a block works on. Kept in shared memory and read again where it is needed: the main loop leaves no register
/// free.
template <class Element>
struct TilePlace {
  Element const *k, *v;  ///< the first row of the head's keys, or of its first page
  LeftBehind behind;     ///< where keys are in pages
  KeyWalk walk;
  Sequence sequence;
  FeatureTile tile;
  int head_kv;

  CUTE_DEVICE TilePlace(FeatureParams const& p, Sequence const& sequence, FeatureTile const& tile, KeyWalk const& walk)
      : walk(walk), sequence(sequence), tile(tile), head_kv(p.by_group.quotient(tile.head)) {
    if (p.page_table != nullptr) behind = visible_keys(p, sequence, p.by_pack.quotient(tile.row_begin));
    k = first_row(p, p.k, p.k_stride);
    v = first_row(p, p.v, p.v_stride);
  }

 private:
  CUTE_DEVICE Element const* first_row(FeatureParams const& p, void const* tensor, Strides const& stride) const {
    return static_cast<Element const*>(tensor) + head_kv * stride.head + key_entry_offset(p, stride, sequence) +
           (p.page_table == nullptr ? sequence.first_k * stride.seqlen : 0);
  }
};

/// Starts the copies of the tile's queries.
template <ForwardConfig C>
CUTE_DEVICE void load_query_tile(FeatureParams const& p, char* smem, Sequence const& sequence,
                                 FeatureTile const& tile) {
  using Word = typename ForwardTypes<C>::Word;
  using Loader = RowLoader<C.head_dim, C.tile_m, C.threads(), C.element_bytes()>;
  auto const* const q = static_cast<Word const*>(p.q) + sequence.entry_q * p.q_stride.batch +
                        sequence.first_q * p.q_stride.seqlen + tile.head * p.q_stride.head;
  if constexpr (!C.scored()) {
    if (p.pack == 1) {
      return Loader::load_leading(smem, q, p.q_stride.seqlen, tile.row_begin, sequence.queries, p.head_dim);
    }
  }
  Loader::load(smem, q, p.head_dim, !C.scored() || p.vectors, [&](int row) {
    QueryRow const here = query_row(p, tile, tile.row_begin + row);
    Word const* const from = q + uint32_t(here.query) * p.q_stride.seqlen;
    return here.query < sequence.queries ? from + (here.head - tile.head) * p.q_stride.head : nullptr;
  });
}

/// Where row `at` of the tile's sequence stands in lse.
CUTE_DEVICE int64_t lse_row(FeatureParams const& p, Sequence const& s, QueryRow const& at) {
  return s.batch * p.lse_batch_stride + at.head * p.lse_head_stride + s.first_q + at.query;
}
/// And in o.
template <class Element>
CUTE_DEVICE Element* output_row(FeatureParams const& p, Sequence const& s, QueryRow const& at) {
  return static_cast<Element*>(p.o) + s.entry_q * p.o_stride.batch + int64_t(s.first_q + at.query) * p.o_stride.seqlen +
         at.head * p.o_stride.head;
}

}  // namespace cutlass_fmha
