// What a launch of a scored row reads: everything that an attention call may say. Host code, no CUDA needed.
//
// One sequence is a batch entry. Its queries are numbered i = 0 .. and its keys j = 0 .. from its own first one on. The
// mask is aligned by `offset` = 0 ("top-left") or seqlen_k - seqlen_q of the sequence ("bottom-right"). Key j is
// visible to query i when
//     (i + offset - window_left <= j <= i + offset + window_right   or   j < prefix_lengths[batch])
//     and mask[batch, head, i, j]   and   a block list names the block of (i, j)
// each part only where it is given. Its score is
//     softcap tanh(scale q k / softcap) + bias[batch, head, i, j] - alibi_slope |i + offset - j|
// and a sink is one more key of that score, the same for all queries of a head, whose value is 0.
#pragma once

#include <cstdint>

#include "../config.h"
#include "../divisor.h"
#include "../host_device.h"
#include "../params.h"
#include "dropout.h"

namespace cutlass_fmha {

/// Keys whose rows follow each other wherever a sequence begins with a page, if pages are multiples of so many.
constexpr int kPageRun = 16;

/// Keys of which a lane of a masked row reads a mask or a bias at once.
constexpr int kMaskRun = 4;

/// [batch, head, query, key], in elements; 0 where the tensor is broadcast.
struct ScoreStrides {
  int64_t batch, head, query, key;

  FMHA_HOST_DEVICE int64_t offset(int b, int h, int i, int j = 0) const {
    return b * batch + h * head + i * query + j * key;
  }
};

/// How the masks' bits stand that masked rows read in place of bytes: a word a lane for 16 queries and 64 keys. Its
/// byte n is of the keys from 16 n on, a nibble of query lane / 4 and one of that plus 8; lane t of four has the keys
/// from 4 t on, in MaskedOrder.
struct MaskBits {
  static constexpr int kQueries = 16, kKeys = 64, kLanes = 32;

  int batch, heads, query_groups;  ///< 1 of what the mask is broadcast over
  int key_groups;

  int64_t words() const { return int64_t{batch} * heads * query_groups * key_groups * kLanes; }
  /// .query: from 16 queries to the next.
  ScoreStrides strides() const {
    int64_t const query = int64_t{key_groups} * kLanes, head = query_groups * query;
    return {batch > 1 ? heads * head : 0, heads > 1 ? head : 0, query_groups > 1 ? query : 0, kLanes};
  }
};

enum class BiasType : int { none, same_as_q, float32 };

/// What is known of where the rows of the keys of a step stand.
enum class KeysStand : int {
  in_order,     ///< one stride after another, aligned, with every step before the last a whole one
  whole_pages,  ///< so do those of a page, and no step lies in two
  page_runs,    ///< so do kPageRun of them, wherever these begin
  anyhow,
};

/// A polynomial for tanh: see CapOnTrial.
template <int Terms>
struct CapSeries {
  float terms[Terms];  ///< of q k, in log2 units
  float limit;         ///< up to which magnitude of q k it is right
};

/// What score-mod rows have a walk of its own for: the only modifier that there is. Questions about others would cut
/// its code into pieces that are not mixed with the softmax.
enum class Modifier : int {
  any,
  alibi,    ///< of one head in a tile
  softcap,  ///< where the softmax's trial takes tanh(x) by a polynomial, and nothing else becomes of scores
  dropout,  ///< of one head in a tile
};

/// How a masked row reads a mask, beside a bias: as it is, or its bits, or either. Two walks would spill where
/// registers are scarce: sm_89's D128 has bits, its D96 bytes, as have rows for values of more than 128.
struct ReadsMask {
  bool bytes, bits;
};
constexpr ReadsMask reads_mask(ForwardConfig const& c) {
  int const spare = spare_registers(c);
  return {spare >= 60, spare < 60 || (spare >= 70 && c.head_dim_v() <= 128)};
}

struct FeatureParams {
  void const* q;  ///< [batch, seqlen_q, num_heads, head_dim], or [total_q, num_heads, head_dim]
  void const* k;  ///< [batch, seqlen_k, num_heads_kv, head_dim], [total_k, ...], or pages: [pages, page_size, ...]
  void const* v;  ///< as k, with head_dim_v
  void* o;        ///< as q, with head_dim_v; unused with splits
  float* lse;     ///< [batch, num_heads, seqlen_q] or [num_heads, total_q], natural log; may be null
  Strides q_stride, k_stride, v_stride, o_stride;  ///< .batch: of a page, with pages; unused with cu_seqlens

  int batch, num_heads, num_heads_kv;
  int seqlen_q, seqlen_k;    ///< of each sequence; with cu_seqlens, with lengths or with pages: at most
  int entries_k, rows_k;     ///< batch entries or pages that k and v have, and rows of each: read by copies by TMA
  int head_dim, head_dim_v;  ///< at most those of the row; their rest is zeros
  bool vectors;  ///< every address and stride of q, k, v and o, and both head dims, are multiples of 16 bytes

  // Which rows of the tensors are a sequence's. All int32 on the device; null where not given.
  int const* cu_seqlens_q;   ///< [batch + 1]: first rows of the sequences
  int const* cu_seqlens_k;   ///< [batch + 1]
  int const* seqused_q;      ///< [batch]: queries beyond this many have output 0 and LSE -inf
  int const* seqused_k;      ///< [batch]: rows of k and v that are in use, counted with leftpad_k
  int const* leftpad_k;      ///< [batch]: rows before the first key
  int const* batch_index_k;  ///< [batch]: which batch entry of k and v is this sequence's
  int const* page_table;     ///< [batch, pages of a sequence at most]: which page holds rows page_size * n and on
  int64_t page_table_stride;
  int page_size;
  Divisor by_page_size;

  // Which keys are visible.
  bool bottom_right;
  int window_left, window_right;  ///< negative: without limit
  int const* prefix_lengths;      ///< [batch]
  uint8_t const* mask;            ///< bool: nonzero is visible
  ScoreStrides mask_stride;
  uint32_t* mask_bits;        ///< of masked rows, room for MaskBits: then the mask itself is read by what packs it
  int const* block_counts;    ///< [batch, head, query block]: how many entries of block_indices count
  int const* block_indices;   ///< [batch, head, query block, entry]: ascending numbers of key blocks
  ScoreStrides block_stride;  ///< .query: from query block to query block, .key: from entry to entry
  int64_t count_stride[3];    ///< batch, head, query block of block_counts
  int block_m, block_n;       ///< queries and keys of a block; multiples of tile_m and tile_n

  // What becomes of a score.
  float scale;    ///< any finite number
  float softcap;  ///< 0: none
  BiasType bias_type;
  void const* bias;
  ScoreStrides bias_stride;
  float const* alibi_slopes;  ///< [batch, head] by alibi_stride
  int64_t alibi_stride[2];
  float const* sinks;  ///< [head], natural units

  // Dropout of probabilities: see dropout.h.
  uint32_t dropout_threshold;    ///< of 65536 random numbers, how many drop; 0: none
  float dropout_scale;           ///< 65536 / (65536 - dropout_threshold)
  uint64_t const* dropout_seed;  ///< on the device

  // How the work is divided.
  TileSchedule schedule;  ///< of tiles of heads, or of those that are packed
  int pack;  ///< 1, or num_heads / num_heads_kv: so many heads share a tile, row r is head r % pack of query r / pack
  Divisor by_pack;
  Divisor by_group;  ///< by the query heads per head of K and V
  Divisor by_splits;
  int splits;                                 ///< parts of the keys of a sequence, each with thread blocks of its own
  float* partial_o;                           ///< [splits, rows of lse, head_dim_v], when splits > 1
  float* partial_lse;                         ///< [splits, rows of lse]: the log-sum-exp of a part
  float* partial_low;                         ///< [splits, rows of lse]: to be added to it, see epilogue.cuh
  int64_t lse_batch_stride, lse_head_stride;  ///< where row i of a sequence stands in lse: + cu_seqlens_q[batch] + i
  int64_t lse_rows;                           ///< rows of lse in all

  // What the launch finds out of all that, once for all threads.
  bool bias_vectors;         ///< bias: neighbouring keys are neighbours, and each eight of them aligned to 16 bytes
  bool mask_vectors;         ///< mask: the same, to 8 bytes
  ScoreStrides bits_stride;  ///< MaskBits::strides()
  bool raw_scores;           ///< nothing but masks comes between q k and the softmax
  KeptNumbers kept;          ///< by dropout_threshold
  float score_unit;          ///< of scores as the softmax gets them, in natural units: it applies that
  float cap_scale;           ///< 2 log2(e) scale / softcap, finite
  bool keys_before;          ///< no query sees a key that comes after it
  bool near_first;  ///< of score-mod rows: all queries see all keys, and those near by have the least distances
  KeysStand keys_stand;
  uint32_t q_and, q_xor;   ///< of ranged rows, whose scale is positive then: SplitScale
  Divisor by_block_tiles;  ///< by block_tiles
  bool device_lengths;     ///< it is read on the device which rows and keys a tile has
  int block_tiles;         ///< the row's steps of keys in block_n, or in all keys
  int key_blocks;          ///< key blocks of the longest sequence
  Modifier modifier;       ///< of score-mod rows
  CapSeries<4> near_cap;   ///< Modifier::softcap: up to half the cap,
  CapSeries<6> far_cap;    ///< and up to all of it
  float scale_log2;        ///< Modifier::alibi: of q k, in log2 units
};

/// How a masked row has the bits of a mask.
inline MaskBits mask_bits(FeatureParams const& p, ForwardConfig const& c) {
  int64_t const walked = (p.seqlen_k + int64_t{c.tile_n} - 1) / c.tile_n * c.tile_n;
  return {p.mask_stride.batch != 0 ? p.batch : 1, p.mask_stride.head != 0 ? p.num_heads : 1,
          p.mask_stride.query != 0 ? ceil_div(p.seqlen_q, MaskBits::kQueries) : 1,
          int((walked + MaskBits::kKeys - 1) / MaskBits::kKeys)};
}

/// What the launch that packs a mask for masked rows reads.
struct PackMaskParams {
  uint8_t const* mask;
  ScoreStrides stride;
  uint32_t* bits;
  MaskBits groups;
  int queries, keys;
  bool vectors;  ///< neighbouring keys are neighbours, and each four of them aligned and all there
};

/// What a launch of a row that copies by TMA reads besides.
struct FeatureTmaParams : FeatureParams {
  explicit FeatureTmaParams(FeatureParams const& p) : FeatureParams(p) {}

  TensorMap k_map{}, v_map{};
};

}  // namespace cutlass_fmha
