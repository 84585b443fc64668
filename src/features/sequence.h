// What a thread block of a scored row computes, and which rows of the tensors that is. Which keys its queries see:
// core/visibility.h. Plain integer arithmetic, the same on host and device.
#pragma once

#include "../core/scheduler.h"
#include "../host_device.h"
#include "params.h"

namespace cutlass_fmha {

FMHA_HOST_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
FMHA_HOST_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

/// A sequence's lengths, and where it stands in the tensors.
struct Sequence {
  int batch;
  int entry_q, entry_k;          ///< batch entry of q and o, of k and v
  int rows_q;                    ///< rows of o and lse that are this sequence's
  int first_q = 0, first_k = 0;  ///< rows before the sequence's first one in its batch entry
  int queries = 0, keys = 0;     ///< that count: the other rows of o are zeros
  int offset = 0;                ///< query i stands beside key i + offset
};

/// Of a document that is longer than the launch was told, whatever the device says, the first rows: masks, lists and
/// workspaces are laid out by that.
FMHA_HOST_DEVICE inline Sequence sequence_at(FeatureParams const& p, int batch) {
  Sequence s{.batch = batch, .entry_q = batch, .entry_k = batch, .rows_q = p.seqlen_q};
  int end_k = p.seqlen_k;  // rows of k in use
  if (p.cu_seqlens_q != nullptr) {
    s.first_q = p.cu_seqlens_q[batch];
    s.rows_q = smaller(p.cu_seqlens_q[batch + 1] - s.first_q, p.seqlen_q);
    s.entry_q = 0;
  }
  if (p.cu_seqlens_k != nullptr) {
    s.first_k = p.cu_seqlens_k[batch];
    end_k = smaller(p.cu_seqlens_k[batch + 1] - s.first_k, p.seqlen_k);
    s.entry_k = 0;
  }
  if (p.batch_index_k != nullptr) s.entry_k = p.batch_index_k[batch];
  s.queries = p.seqused_q != nullptr ? smaller(s.rows_q, p.seqused_q[batch]) : s.rows_q;
  if (p.seqused_k != nullptr) end_k = smaller(end_k, p.seqused_k[batch]);
  int const padding = p.leftpad_k != nullptr ? p.leftpad_k[batch] : 0;
  s.first_k += padding;
  s.keys = larger(0, end_k - padding);
  s.offset = p.bottom_right ? s.keys - s.queries : 0;
  return s;
}

/// Tiles are cut from a sequence in multiples of so many rows: a warp's, that its diagonal lies in as few steps of keys
/// as before.
constexpr int kCutRows = 32;
static_assert(kCutRows % MaskBits::kQueries == 0);

/// One thread block's part: packed query rows [row_begin, row_begin + tile_m) of the heads from `head` on, and one part
/// of the keys. Packed row r is head `head + r % pack` of query r / pack.
struct FeatureTile {
  int row_begin, head, batch, split;
};

/// Under a diagonal, whose last queries see the most keys, a sequence's first tile is the one that is cut short: the
/// others begin earlier.
FMHA_HOST_DEVICE inline void cut_first(FeatureParams const& p, int tile_m, FeatureTile& tile, Sequence& s) {
  if (p.window_right < 0 || p.pack > 1) return;
  int const lacking = (tile_m - 1 - (s.rows_q + tile_m - 1) % tile_m) / kCutRows * kCutRows;
  if (tile.row_begin > 0) {
    tile.row_begin -= lacking;
  } else {
    s.rows_q = smaller(s.rows_q, tile_m - lacking);
    s.queries = smaller(s.queries, s.rows_q);
  }
}

/// Of the tile's rows, so many are of queries that the longest sequence has.
FMHA_HOST_DEVICE inline int rows_of(FeatureParams const& p, FeatureTile const& tile, int tile_m) {
  return smaller(tile_m, p.seqlen_q * p.pack - tile.row_begin);
}

FMHA_HOST_DEVICE inline int64_t grid_size(FeatureParams const& p, int tile_m) {
  int64_t const tiles = (int64_t(p.seqlen_q) * p.pack + tile_m - 1) / tile_m;
  return tiles * (p.num_heads / p.pack) * p.batch * p.splits;
}

/// Parts of one tile's keys follow each other.
FMHA_HOST_DEVICE inline FeatureTile tile_at(FeatureParams const& p, int tile_m, int block) {
  int const number = p.by_splits.quotient(block);
  WorkTile const tile = work_tile(p.schedule, number);
  return {tile.m_block * tile_m, tile.head * p.pack, tile.batch, block - number * p.splits};
}

/// Of a launch whose elements have `bytes`. For a problem with at least one tile.
inline TileOrder tile_order(FeatureParams const& p, int tile_m, int warps, int bytes, Gpu const& gpu) {
  int const heads = p.num_heads / p.pack, tiles = ceil_div(p.seqlen_q * p.pack, tile_m);
  bool const grow = p.window_left < 0 && p.window_right >= 0;
  int64_t const diagonal = int64_t(p.bottom_right ? p.seqlen_k - p.seqlen_q : 0) + p.window_right;
  // Tiles that are alike follow each other: what leaves some of each head to run at a time is for those that are not.
  return tile_order(grow ? gpu : Gpu{0, gpu.l2_bytes}, warps, heads * p.batch, p.num_heads / p.num_heads_kv / p.pack,
                    int64_t(p.seqlen_k) * (p.head_dim + p.head_dim_v) * bytes, tiles,
                    grow ? short_tiles(diagonal * p.pack, p.seqlen_k * int64_t(p.pack), tile_m, tiles) : 0);
}

inline void set_schedule(FeatureParams& p, TileOrder const& order, int tile_m) {
  p.schedule = schedule_of(order, true, ceil_div(p.seqlen_q * p.pack, tile_m), p.num_heads / p.pack, p.batch);
  p.by_splits = Divisor(p.splits);
  p.by_group = Divisor(p.num_heads / p.num_heads_kv);
}

/// Where the rows of k or v that key_row_offset() counts begin, in elements.
FMHA_HOST_DEVICE inline int64_t key_entry_offset(FeatureParams const& p, Strides const& stride, Sequence const& s) {
  return p.page_table == nullptr ? s.entry_k * stride.batch : 0;
}

/// Which of the pages holds a row of the sequence.
FMHA_HOST_DEVICE inline int page_number(FeatureParams const& p, Sequence const& s, int row) {
  return p.page_table[s.batch * p.page_table_stride + p.by_page_size.quotient(row)];
}

/// And which of the page's.
FMHA_HOST_DEVICE inline int row_in_page(FeatureParams const& p, int row) {
  return row - p.by_page_size.quotient(row) * p.page_size;
}

/// Where a row of page number `page` stands, in elements.
FMHA_HOST_DEVICE inline int64_t page_row_offset(FeatureParams const& p, Strides const& stride, int page, int row) {
  return page * stride.batch + row_in_page(p, row) * stride.seqlen;
}

/// Where a row of k or v stands from there on, in elements; first_k is the row of the first key.
FMHA_HOST_DEVICE inline int64_t key_row_offset(FeatureParams const& p, Strides const& stride, Sequence const& s,
                                               int row) {
  if (p.page_table == nullptr) return row * stride.seqlen;
  return page_row_offset(p, stride, page_number(p, s, row), row);
}

}  // namespace cutlass_fmha
