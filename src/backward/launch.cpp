#include "launch.h"

#include <algorithm>
#include <climits>
#include <string>
#include <vector>

#include "../backward_wide/launch.h"
#include "../core/visibility.h"
#include "../device_guard.h"
#include "../launch.h"
#include "../require.h"
#include "../tensor_map.h"

namespace cutlass_fmha {
namespace {

std::array<Operand, 8> all_operands(BackwardParams const& p) {
  auto const [q, k, v, o] = operands(p);
  auto const gradient = [](char const* name, void const* address, Strides const& stride, Operand const& of) {
    return Operand{name, address, stride, of.seqlen, of.heads};
  };
  return {q,
          k,
          v,
          o,
          gradient("dout", p.dout, p.dout_stride, o),
          gradient("dq", p.dq, p.dq_stride, q),
          gradient("dk", p.dk, p.dk_stride, k),
          gradient("dv", p.dv, p.dv_stride, v)};
}

/// Of a head of keys, the tiles that at most half as many queries see as the first.
int short_key_tiles(BackwardParams const& p, int tile_n, int tiles) {
  if (p.window_right < 0 || p.window_left >= 0) return 0;
  int64_t const diagonal = int64_t(p.bottom_right ? p.seqlen_k - p.seqlen_q : 0) + p.window_right;
  int64_t const most = std::min<int64_t>(p.seqlen_q, p.seqlen_q + diagonal);
  int64_t const begin = p.seqlen_q + diagonal - most / 2;  // a key from there on has at most half
  int64_t const count = tiles - (std::max<int64_t>(begin, 0) + tile_n - 1) / tile_n;
  return int(std::clamp<int64_t>(count, 0, tiles - 1));
}

/// Without a diagonal, the tiles of one head follow each other, so that its Q, dO and dQ's sums stay in L2. Under one,
/// the long tiles of some heads are mixed, the longest first, and the short ones of all come last, as tile_order()
/// says; but of no more heads than L2 holds or give each SM two tiles. On an H200, causal, H32/8 S8192 D128 took 3.9 ms
/// in place of 4.7 by heads. Where tiles of a head wait for each other, those of all heads are mixed, if memory allows:
/// fewer of a head run at a time. A last tile of a walk of its own is short, too.
///
/// Of `heads_kv` heads of keys in each of `batch` entries.
TileSchedule key_tile_schedule(BackwardParams const& p, BackwardConfig const& c, int heads_kv, int batch, int device) {
  int const tiles = ceil_div(p.seqlen_k, c.tile_n), group = p.num_heads / p.num_heads_kv;
  int const heads = heads_kv * batch;
  bool const mixed = p.window_right >= 0 || p.ordered;
  if (!mixed && tiles > 1 && p.seqlen_k - (tiles - 1) * c.tile_n <= c.tail)
    return schedule_of({1, tiles - 1}, true, tiles, heads_kv, batch);
  Gpu const gpu = gpu_of(device);
  int64_t const row_bytes = (p.head_dim + p.head_dim_v) * c.element_bytes() + c.head_dim * int(sizeof(float));
  int64_t const cached = gpu.l2_bytes / 2 / (int64_t(larger(1, p.seqlen_q)) * group * row_bytes);
  int64_t const wanted =
      p.ordered && c.architecture().fast_memory ? heads : std::max<int64_t>(cached, 2 * gpu.sms / tiles);
  int64_t const most = std::clamp<int64_t>(wanted, 1, heads), shares = (heads + most - 1) / most;  // alike
  TileOrder const order{int((heads + shares - 1) / shares),
                        shares == 1 ? tiles : tiles - short_key_tiles(p, c.tile_n, tiles)};
  return schedule_of(order, mixed, tiles, heads_kv, batch);
}

/// What makes dQ of what a row writes.
Row const& query_product_of(BackwardConfig const& c) {
  static std::vector<Row const*> const known = [] {
    std::vector<Row const*> found;
    for (Row const& row : rows()) {
      if (row.family() == Family::query_product) found.push_back(&row);
    }
    return found;
  }();
  for (Row const* row : known) {
    auto const& of = std::get<QueryProductConfig>(row->config);
    if (of.arch == c.arch && of.dtype == c.dtype && of.head_dim == c.head_dim) return *row;
  }
  throw std::invalid_argument("this build has no row that makes dQ of dS for head dim " + std::to_string(c.head_dim) +
                              " on sm_" + std::to_string(c.arch));
}

/// A block walks the queries of a tile of keys, of `heads_kv` heads in each of `batch` entries.
void launch_walks(Row const& row, BackwardConfig const& c, BackwardParams& p, int heads_kv, int batch, int device,
                  cudaStream_t stream) {
  // Before the schedule, which counts on it: tiles of all heads have numbers.
  dim3 const grid = grid_of(row, int64_t(batch) * heads_kv * ceil_div(p.seqlen_k, c.tile_n));
  p.schedule = key_tile_schedule(p, c, heads_kv, batch, device);
  if (c.copy != Copy::tma) return launch_kernel(row, grid, &p, device, stream);
  BackwardTmaParams prepared(p);
  set_tensor_maps(prepared, c);
  launch_kernel(row, grid, &prepared, device, stream);
}

/// Writes dS of some heads of keys, and makes dQ of it, until all had their turn.
void launch_turns(Row const& row, BackwardConfig const& c, BackwardParams& p, int device, cudaStream_t stream) {
  Row const& product = query_product_of(c);
  auto const& of_product = std::get<QueryProductConfig>(product.config);
  auto const [rows, width] = scores_layout(p, c.tile_m, c.tile_n);
  p.scores_tile_n = c.tile_n;
  p.scores_tiles = ceil_div(p.seqlen_k, c.tile_n);
  p.scores_width = int(width);
  int const heads = p.batch * p.num_heads_kv, turn = std::min(p.scores_turn, heads);
  for (p.scores_first = 0; p.scores_first < heads; p.scores_first += turn) {
    p.scores_turn = std::min(turn, heads - p.scores_first);
    if (p.seqlen_k > 0) launch_walks(row, c, p, p.scores_turn, 1, device, stream);
    if (p.seqlen_q > 0 && p.dq != nullptr) {
      int64_t const of_turn = int64_t(p.scores_turn) * (p.num_heads / p.num_heads_kv);
      launch_kernel(product, grid_of(product, of_turn * ceil_div(p.seqlen_q, of_product.tile_m)), &p, device, stream);
    }
  }
}

}  // namespace

void check(Row const& row, BackwardParams const& p) {
  auto const* const own = std::get_if<BackwardConfig>(&row.config);
  auto const* const wide = std::get_if<WideBackwardConfig>(&row.config);
  require(own != nullptr || wide != nullptr, [&] {
    return std::string(row.name) + " is of family " + name_of(row.family()) +
           ", and these are parameters of a backward";
  });
  TileConfig const& c = own != nullptr ? static_cast<TileConfig const&>(*own) : *wide;
  require(int64_t(p.batch) * p.num_heads <= INT_MAX,
          [] { return "batch * num_heads must be below 2^31: heads of all batch entries have numbers"; });
  check(p, c.element_bytes());
  bool const writes_scores = own != nullptr && own->writes_scores;
  bool const any = p.seqlen_q > 0 && p.seqlen_k > 0 && !p.empty();
  require(!writes_scores || (p.scores_turn > 0 && (p.scores != nullptr || !any)), [&] {
    return std::string(row.name) + " writes dS: it needs scores, and scores_turn heads of keys at a time";
  });
  if (!writes_scores) refuse(row, {{"scores", p.scores != nullptr}});
  refuse(row, {{"page_table", p.page_table != nullptr},
               {"batch_index_k", p.batch_index_k != nullptr},
               {"pack", p.pack != 1},
               {"splits", p.splits != 1},
               {"tail", p.tail != nullptr}});
  if (own != nullptr && !own->scored()) {
    refuse(row, {{"mask", p.mask != nullptr},
                 {"bias", p.bias != nullptr},
                 {"softcap", p.softcap != 0.f},
                 {"alibi_slopes", p.alibi_slopes != nullptr},
                 {"dropout_threshold", p.dropout_threshold != 0},
                 {"block_counts", p.block_counts != nullptr}});
  }
  if (own != nullptr && (!own->scored() || writes_scores)) refuse(row, {{"ordered", p.ordered}});
  require(!p.block_counts || (p.block_m % kListedQueries == 0 && p.block_n % kListedKeys == 0), [&] {
    return std::string(row.name) + " takes blocks of a mask that are multiples of " + std::to_string(kListedQueries) +
           " x " + std::to_string(kListedKeys) + ", got " + std::to_string(p.block_m) + " x " +
           std::to_string(p.block_n);
  });
  require(p.dbias == nullptr || p.bias != nullptr, [] { return "dbias needs a bias"; });
  require(p.dbias == nullptr || p.softcap == 0.f || wide != nullptr, [&] {
    return std::string(row.name) + " has no dbias beside a softcap: what that leaves of dS is all that it keeps";
  });
  require(p.dsinks == nullptr || p.sinks != nullptr, [] { return "dsinks needs sinks"; });
  require(p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim, [&] {
    return std::string(row.name) + " takes head dims up to " + std::to_string(c.head_dim) + ", got " +
           std::to_string(p.head_dim) + " and " + std::to_string(p.head_dim_v);
  });
  require(p.head_dim % 8 == 0 && p.head_dim_v % 8 == 0,
          [&] { return std::string(row.name) + " needs head dims that are multiples of 8"; });
  for (Operand const& x : all_operands(p)) check_aligned(row, x, p.batch, 16, c.element_bytes());
}

void launch_before(TileConfig const& c, BackwardParams const& p, int device, cudaStream_t stream) {
  int64_t const tiles = int64_t(p.batch) * p.num_heads * ceil_div(p.seqlen_q, p.tile_m);
  int64_t const blocks = tiles + rest_blocks(p);
  if (blocks == 0) return;
  Row const& before = helper(Family::backward_before, c.dtype, c.arch);
  launch_kernel(before, grid_of(before, blocks), &p, device, stream);
}

void launch(Row const& row, BackwardParams const& params, int device, cudaStream_t stream) {
  if (row.family() == Family::backward_wide) return launch_backward_wide(row, params, device, stream);
  auto const& c = std::get<BackwardConfig>(row.config);
  BackwardParams p = params;
  p.vectors = true;
  p.device_lengths = device_lengths(p);
  p.tile_m = c.tile_m;
  p.tile_n = c.tile_n;
  p.unit = c.unit();
  p.row_dim = c.writes_scores ? 0 : c.head_dim;
  p.head_tiles = workspace_tiles(p, c.tile_m);
  p.dq_sums = p.workspace;
  int64_t const head_tiles = p.num_heads * p.head_tiles;
  p.row_terms = p.workspace + head_tiles * c.tile_m * p.row_dim;
  float* end = p.row_terms + head_tiles * kTermsOfQuery * c.tile_m;
  p.turns = nullptr;
  if (p.ordered) {
    p.turns = reinterpret_cast<int*>(end);
    end += head_tiles * kTurns;
  }
  p.listed = nullptr;
  int64_t const listing = listing_tiles(p, c.tile_n);
  if (p.block_counts != nullptr) {
    p.listed = reinterpret_cast<ListedTile*>(end);
    p.listed_tiles = reinterpret_cast<int*>(p.listed + listing * listed_room(p, c.tile_m));
    int* const steps = p.listed_tiles + listing;
    p.listed_steps = c.writes_scores ? steps : nullptr;
    end =
        reinterpret_cast<float*>(steps + (c.writes_scores ? listed_steps_of(p, p.batch, 0, 0, c.tile_m, c.tile_n) : 0));
  }
  p.sink_sums = end;
  find_score_terms(p);
  if (p.dropout_threshold == 0) p.dropout_scale = 1.f;
  int64_t const sequences = int64_t(p.batch) * p.num_heads;
  launch_before(c, p, device, stream);
  if (p.seqlen_k > 0 && p.listed != nullptr) {
    Row const& lists = helper(Family::backward_lists, c.dtype, c.arch);
    launch_kernel(lists, grid_of(lists, listing), &p, device, stream);
  }
  if (c.writes_scores) {
    launch_turns(row, c, p, device, stream);
    p.dq = nullptr;  // is written
  } else if (p.seqlen_k > 0) {
    launch_walks(row, c, p, p.num_heads_kv, p.batch, device, stream);
  }
  if (p.seqlen_q > 0 && (p.dq != nullptr || p.dsinks != nullptr)) {
    Row const& after = helper(Family::backward_after, c.dtype, c.arch);
    launch_kernel(after, grid_of(after, sequences * ceil_div(p.seqlen_q, kRowsAfter)), &p, device, stream);
  }
}

}  // namespace cutlass_fmha
