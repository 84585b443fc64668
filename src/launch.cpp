#include "launch.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>

#include "core/scheduler.h"
#include "device_guard.h"
#include "helpers/launch.h"
#include "require.h"
#include "tensor_map.h"

namespace cutlass_fmha {
namespace {

// ---- plain rows ------------------------------------------------------------------------------------------

/// Key j is visible to query i when j <= i + diagonal; kNoDiagonal also where that hides nothing.
int diagonal_of(FeatureParams const& p) {
  if (p.window_right < 0) return kNoDiagonal;
  int64_t const diagonal = int64_t(p.window_right) + (p.bottom_right ? p.seqlen_k - p.seqlen_q : 0);
  return diagonal >= p.seqlen_k - 1 ? kNoDiagonal : int(diagonal);
}

ForwardParams forward_params(FeatureParams const& g) {
  ForwardParams p{};
  p.q = g.q;
  p.k = g.k;
  p.v = g.v;
  p.o = g.o;
  p.lse = g.lse;
  p.q_stride = g.q_stride;
  p.k_stride = g.k_stride;
  p.v_stride = g.v_stride;
  p.o_stride = g.o_stride;
  p.batch = g.batch;
  p.seqlen_q = g.seqlen_q;
  p.seqlen_k = g.seqlen_k;
  p.num_heads = g.num_heads;
  p.num_heads_kv = g.num_heads_kv;
  p.diagonal = diagonal_of(g);
  set_scale(p, g.scale);
  return p;
}

void check_tail(Row const& row, ForwardConfig const& c, AttentionParams const& p) {
  require(c.copy == Copy::tma && c.kv_warps == 1 && diagonal_of(p) == kNoDiagonal,
          [&] { return std::string(row.name) + " has no tail here: rows that copy by TMA have one, without a mask"; });
  auto const [memory, tiles, parts, first, rest] = static_cast<TailRequest const&>(p);
  int64_t const all = int64_t(ceil_div(p.seqlen_q, c.tile_m)) * p.num_heads * p.batch;
  int64_t const key_blocks = ceil_div(p.seqlen_k, c.tile_n), last = key_blocks - first - (parts - 2) * rest;
  require(reinterpret_cast<uintptr_t>(memory) % 16 == 0 && tiles > 0 && tiles <= all && parts > 1 && parts <= 64 &&
              first > 0 && first < key_blocks && rest > 0 && rest < key_blocks && last > 0 && last <= rest &&
              tiles * parts * c.tile_m * (c.head_dim / 4) <= INT_MAX,
          [&] {
            return std::string(row.name) + " can't divide " + std::to_string(tiles) + " of " + std::to_string(all) +
                   " tiles into a part of " + std::to_string(first) + " and " + std::to_string(parts - 1) + " of " +
                   std::to_string(rest) + " of " + std::to_string(key_blocks) + " key blocks";
          });
}

/// The tail that check_tail() passed.
Tail tail_of(AttentionParams const& p, ForwardConfig const& c, int64_t tiles) {
  Tail tail;
  if (!p.tail) return tail;
  tail.begin = int(tiles - p.tail_tiles);
  tail.tiles = int(p.tail_tiles);
  tail.parts = int(p.tail_parts);
  tail.first = int(p.tail_first);
  tail.rest = int(p.tail_rest);
  tail.by_rest = Divisor(tail.parts - 1);
  int64_t const rows = p.tail_tiles * p.tail_parts * c.tile_m;
  tail.o = p.tail;
  tail.maxima = tail.o + rows * c.head_dim;
  tail.sums = tail.maxima + rows;
  return tail;
}

}  // namespace

void check_plain(Row const& row, AttentionParams const& p) {
  auto const& c = std::get<ForwardConfig>(row.config);
  refuse_features(row, p);
  refuse(row, {{"bias", p.bias != nullptr},
               {"cu_seqlens_q", p.cu_seqlens_q != nullptr},
               {"cu_seqlens_k", p.cu_seqlens_k != nullptr},
               {"seqused_q", p.seqused_q != nullptr},
               {"seqused_k", p.seqused_k != nullptr},
               {"leftpad_k", p.leftpad_k != nullptr},
               {"batch_index_k", p.batch_index_k != nullptr},
               {"pack", p.pack != 1}});
  require(p.head_dim == c.head_dim && p.head_dim_v == c.head_dim, [&] {
    return std::string(row.name) + " takes a head dim of " + std::to_string(c.head_dim) + ", got " +
           std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v);
  });
  for (Operand const& x : operands(p)) check_aligned(row, x, p.batch, c.alignment(), c.element_bytes());
  require(!p.lse || (p.lse_head_stride == p.seqlen_q && p.lse_batch_stride == int64_t(p.num_heads) * p.seqlen_q),
          [&] { return std::string(row.name) + " writes a contiguous lse: [batch, num_heads, seqlen_q]"; });
  if (p.tail) check_tail(row, c, p);
}

void launch_plain(Row const& row, AttentionParams const& p, int device, cudaStream_t stream) {
  auto const& c = std::get<ForwardConfig>(row.config);
  ForwardParams params = forward_params(p);
  int64_t const tiles = grid_size(params, c.tile_m);
  Tail const tail = tail_of(p, c, tiles);
  dim3 const grid = grid_of(row, tiles + int64_t(tail.tiles) * std::max(0, tail.parts - 1));
  set_schedule(params, tile_order(params, c, gpu_of(device)), c.tile_m);
  if (c.copy != Copy::tma) return launch_kernel(row, grid, &params, device, stream);
  ForwardTmaParams prepared(params);
  prepared.tail = tail;
  set_tensor_maps(prepared, c);
  launch_kernel(row, grid, &prepared, device, stream);
  if (tail.tiles > 0) {
    TailParams const merged{tail,       params.o, params.lse,       params.o_stride, params.seqlen_q, params.num_heads,
                            c.head_dim, c.tile_m, params.scale_log2};
    launch(helper(Family::merge_tail, c.dtype, c.arch), merged, device, stream);
  }
}

// ---- any row ---------------------------------------------------------------------------------------------

dim3 grid_of(Row const& row, int64_t blocks) {
  require(blocks <= INT_MAX, [&] {
    return std::string(row.name) + " needs " + std::to_string(blocks) +
           " thread blocks for this problem; a grid holds at most 2147483647";
  });
  return dim3(unsigned(blocks));
}

void check_aligned(Row const& row, Operand const& x, int batch, int bytes, int element_bytes) {
  require(reinterpret_cast<uintptr_t>(x.address) % bytes == 0, [&] {
    return std::string(row.name) + " needs pointers aligned to " + std::to_string(bytes) + " bytes, and that of " +
           x.name + " is not";
  });
  // The stride of a dimension of size 1 is never used.
  int64_t const used =
      (batch > 1 ? x.stride.batch : 0) | (x.seqlen > 1 ? x.stride.seqlen : 0) | (x.heads > 1 ? x.stride.head : 0);
  require(used * element_bytes % bytes == 0, [&] {
    return std::string(row.name) + " needs strides that are multiples of " + std::to_string(bytes) +
           " bytes, and a stride of " + x.name + " is not";
  });
}

void refuse(Row const& row, std::initializer_list<Given> features) {
  for (Given const& f : features) {
    require(!f.given, [&] { return std::string(row.name) + " does not know " + f.name; });
  }
}

void refuse_features(Row const& row, FeatureParams const& p) {
  refuse(row, {{"page_table", p.page_table != nullptr},
               {"window_left", p.window_left >= 0},
               {"prefix_lengths", p.prefix_lengths != nullptr},
               {"mask", p.mask != nullptr},
               {"mask_bits", p.mask_bits != nullptr},
               {"block_counts", p.block_counts != nullptr},
               {"softcap", p.softcap != 0.f},
               {"alibi_slopes", p.alibi_slopes != nullptr},
               {"sinks", p.sinks != nullptr},
               {"dropout_threshold", p.dropout_threshold != 0},
               {"splits", p.splits != 1}});
}

void check(Row const& row, AttentionParams const& p) {
  switch (row.family()) {
    case Family::plain:
    case Family::few_query:
      check_plain(row, p);
      break;
    case Family::ranged:
    case Family::score_mod:
    case Family::masked:
    case Family::scored:
    case Family::few_query_scored:
      check_features(row, p);
      break;
    case Family::wide:
      check_wide(row, p);
      break;
    case Family::wide_scored:
      check_wide_scored(row, p);
      break;
    default:
      throw std::invalid_argument(std::string(row.name) + " is of family " + name_of(row.family()) +
                                  ", and these are parameters of attention");
  }
  require(!p.tail || row.family() == Family::plain, [&] { return std::string(row.name) + " has no tail"; });
  check(p, bytes_of(row.dtype()));
}

void launch(Row const& row, AttentionParams const& p, int device, cudaStream_t stream) {
  switch (row.family()) {
    case Family::ranged:
    case Family::score_mod:
    case Family::masked:
    case Family::scored:
    case Family::few_query_scored:
      return launch_features(row, p, device, stream);
    case Family::wide:
      return launch_wide(row, p, device, stream);
    case Family::wide_scored:
      return launch_wide_scored(row, p, device, stream);
    default:
      return launch_plain(row, p, device, stream);
  }
}

}  // namespace cutlass_fmha
