#include "host_model.h"

#include <pybind11/stl.h>

#include <array>
#include <tuple>
#include <vector>

#include "../attention_params.h"
#include "../core/visibility.h"
#include "dropout.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

using Tile = std::tuple<int, int, int, int>;  // first packed row, head, batch, part of the keys

std::vector<Tile> feature_tiles(AttentionParams p, int tile_m, int mixed_heads, int long_tiles) {
  std::vector<Tile> tiles;
  if (grid_size(p, tile_m) == 0) return tiles;  // nothing to schedule, as a launch knows
  set_schedule(p, {mixed_heads, long_tiles}, tile_m);
  for (int block = 0; block < grid_size(p, tile_m); ++block) {
    FeatureTile const t = tile_at(p, tile_m, block);
    tiles.emplace_back(t.row_begin, t.head, t.batch, t.split);
  }
  return tiles;
}

struct Placed {
  FeatureTile tile;
  Sequence sequence;
};
Placed placed(FeatureParams const& p, Tile const& at, int tile_m, bool cuts_first) {
  FeatureTile tile{std::get<0>(at), std::get<1>(at), std::get<2>(at), std::get<3>(at)};
  Sequence s = sequence_at(p, tile.batch);
  if (cuts_first) cut_first(p, tile_m, tile, s);
  return {tile, s};
}

/// The first keys of the steps that a thread block walks, each with whether a range hides some key from some query.
std::vector<std::tuple<int, bool>> key_steps(AttentionParams p, Tile const& at, int tile_m, int step_keys,
                                             bool cuts_first) {
  if (p.block_counts != nullptr) set_blocks(p, step_keys);
  p.by_splits = Divisor(p.splits);
  auto const [tile, s] = placed(p, at, tile_m, cuts_first);
  int const i_begin = p.by_pack.quotient(tile.row_begin), i_end = p.by_pack.quotient(tile.row_begin + tile_m - 1) + 1;
  KeyWalk const walk = walk_of(p, s, tile, i_begin, i_end, step_keys);
  std::vector<std::tuple<int, bool>> steps;
  for (int step = 0; step < walk.tiles; ++step) {
    int const begin = walk.key_begin(p, step, step_keys);
    CommonView const view(p, s, i_begin, smaller(i_end, s.queries) - 1);
    steps.emplace_back(begin, !view.all_see(begin, step_keys));
  }
  return steps;
}

py::dict sequence(AttentionParams const& p, int batch) {
  Sequence const s = sequence_at(p, batch);
  py::dict found;
  found["entry_q"] = s.entry_q;
  found["entry_k"] = s.entry_k;
  found["rows_q"] = s.rows_q;
  found["first_q"] = s.first_q;
  found["first_k"] = s.first_k;
  found["queries"] = s.queries;
  found["keys"] = s.keys;
  found["offset"] = s.offset;
  return found;
}

}  // namespace

void bind_feature_host_model(py::module_& host) {
  host.def("sequence", &sequence, "Lengths and place of a sequence.", py::arg("params"), py::arg("batch"));
  host.def(
      "sees",
      [](AttentionParams const& p, int batch, int query, int key) {
        return visible_keys(p, sequence_at(p, batch), query).sees(key);
      },
      "Whether a query sees a key, so far as ranges go.", py::arg("params"), py::arg("batch"), py::arg("query"),
      py::arg("key"));
  host.def("feature_tiles", &feature_tiles, "(row_begin, head, batch, split) of every thread block, in launch order.",
           py::arg("params"), py::arg("tile_m"), py::arg("mixed_heads"), py::arg("long_tiles"));
  host.def("key_steps", &key_steps, "(first key, masked by a range) of every step that a thread block walks.",
           py::arg("params"), py::arg("tile"), py::arg("tile_m"), py::arg("step_keys"), py::arg("cuts_first") = false);
  host.def(
      "rows_of_block",
      [](AttentionParams const& p, Tile const& at, int tile_m) {
        auto const [tile, s] = placed(p, at, tile_m, true);
        return std::array<int, 2>{tile.row_begin, smaller(tile.row_begin + tile_m, s.rows_q * p.pack)};
      },
      "[begin, end) of the packed rows of a tile, where a sequence's first one is cut short.", py::arg("params"),
      py::arg("tile"), py::arg("tile_m"));
  host.def(
      "queries_of_key",
      [](AttentionParams const& p, int batch, int key) {
        VisibleQueries const seen = visible_queries(p, sequence_at(p, batch), key);
        return std::array<int, 2>{seen.begin, seen.end};
      },
      "[begin, end) of the queries that see a key, so far as ranges go.", py::arg("params"), py::arg("batch"),
      py::arg("key"));
  host.def(
      "query_tiles",
      [](AttentionParams const& p, int batch, int key_begin, int key_end, int tile_queries) {
        Sequence const s = sequence_at(p, batch);
        int const last = smaller(key_end, s.keys) - 1;
        QueryWalk const walk =
            last < key_begin ? QueryWalk{}
                             : query_walk(visible_queries(p, s, key_begin), visible_queries(p, s, last), tile_queries);
        return std::array<int, 2>{walk.first, walk.tiles};
      },
      "(first, how many) of the tiles of queries that a tile of keys is walked with.", py::arg("params"),
      py::arg("batch"), py::arg("key_begin"), py::arg("key_end"), py::arg("tile_queries"));
  host.def(
      "key_row_offset",
      [](AttentionParams const& p, int batch, int key) {
        Sequence const s = sequence_at(p, batch);
        return key_entry_offset(p, p.k_stride, s) + key_row_offset(p, p.k_stride, s, s.first_k + key);
      },
      "Where a key stands in k, in elements.", py::arg("params"), py::arg("batch"), py::arg("key"));
  host.def(
      "philox",
      [](uint64_t seed, std::array<uint32_t, 4> const& counter) {
        PhiloxWords const words = philox(seed, {{counter[0], counter[1], counter[2], counter[3]}});
        return std::array<uint32_t, 4>{words.word[0], words.word[1], words.word[2], words.word[3]};
      },
      "Philox4x32-10.", py::arg("seed"), py::arg("counter"));
}

}  // namespace cutlass_fmha
