#include "host_model.h"

#include <pybind11/stl.h>

#include <array>
#include <cute/tensor.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/mask.cuh"
#include "core/online_softmax.cuh"
#include "core/scheduler.h"
#include "core/tile.cuh"
#include "features/host_model.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

using Matrix = std::vector<std::vector<float>>;

ForwardParams lengths(int seqlen_q, int seqlen_k, std::optional<int> diagonal) {
  ForwardParams p{};
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.diagonal = diagonal.value_or(kNoDiagonal);
  return p;
}

/// One query row through the kernel's own softmax and mask, a block of kTileN keys at a time, last block first.
/// scores: of all keys, unscaled. values: [keys, kDim]. Returns (O, LSE).
struct HostMaxima {
  float& m;
  float get(int) const { return m; }
  void set(int, float maximum) const { m = maximum; }
};

template <class Element>
std::tuple<std::vector<float>, float> softmax_row(std::vector<float> const& scores, Matrix const& values, float scale,
                                                  int row, std::optional<int> diagonal) {
  using namespace cute;
  constexpr int kTileN = 16, kDim = 4;
  ForwardParams p = lengths(row + 1, int(scores.size()), diagonal);
  set_scale(p, scale);
  float const sign = p.q_and == 0 ? 0.f : p.q_xor != 0 ? -1.f : 1.f;  // what the kernel does to Q

  OnlineSoftmax<1, Element, SingleThread> softmax(p.scale_log2);
  float maximum = -INFINITY;
  HostMaxima const maxima{maximum};
  auto output = make_tensor<float>(Shape<_1, Int<kDim>>{});
  clear(output);
  int const blocks = key_blocks(p, row, row + 1, kTileN);
  for (int block = blocks - 1; block >= 0; --block) {
    auto block_scores = make_tensor<float>(Shape<_1, Int<kTileN>>{});
    for (int col = 0; col < kTileN; ++col) {
      size_t const key = size_t(block) * kTileN + col;
      block_scores(0, col) = key < scores.size() ? sign * scores[key] : 0.f;
    }
    if (block >= full_key_blocks(p, row, kTileN)) {
      apply_mask(p, block_scores, make_identity_tensor(Shape<_1, Int<kTileN>>{}), row, block * kTileN);
    }
    auto pairs = make_tensor<uint32_t>(Shape<_1, Int<kTileN / 2>>{});
    if (block == blocks - 1) {
      softmax.template step<true>(block_scores, pairs, output, maxima);
    } else {
      softmax.template step<false>(block_scores, pairs, output, maxima);
    }
    for (int col = 0; col < kTileN; ++col) {
      size_t const key = size_t(block) * kTileN + col;
      if (key >= scores.size()) continue;
      uint16_t const bits = uint16_t(pairs(0, col / 2) >> (16 * (col % 2)));
      for (int d = 0; d < kDim; ++d) output(0, d) += float(Element::bitcast(bits)) * values[key][d];
    }
  }
  float const lse = softmax.finalize(output, maxima)[0];
  return {std::vector<float>(&output(0), &output(0) + kDim), lse};
}

std::tuple<std::vector<float>, float> online_softmax(std::vector<float> const& scores, Matrix const& values,
                                                     float scale, int row, std::optional<int> diagonal,
                                                     std::string const& dtype) {
  if (values.size() != scores.size()) throw std::invalid_argument("scores and values must have the same length");
  for (auto const& v : values) {
    if (v.size() != 4) throw std::invalid_argument("values must have 4 columns");
  }
  if (dtype == "float16") return softmax_row<cutlass::half_t>(scores, values, scale, row, diagonal);
  if (dtype == "bfloat16") return softmax_row<cutlass::bfloat16_t>(scores, values, scale, row, diagonal);
  throw std::invalid_argument("dtype must be float16 or bfloat16, got " + dtype);
}

std::vector<std::array<int, 3>> work_tiles(int batch, int num_heads, int seqlen_q, bool masked, int tile_m,
                                           int mixed_heads, int long_tiles) {
  ForwardParams p = lengths(seqlen_q, seqlen_q, masked ? std::optional<int>(0) : std::nullopt);
  p.batch = batch;
  p.num_heads = p.num_heads_kv = num_heads;
  std::vector<std::array<int, 3>> tiles;
  int64_t const blocks = grid_size(p, tile_m);
  if (blocks > 0) set_schedule(p, {mixed_heads, long_tiles}, tile_m);
  for (int64_t block = 0; block < blocks; ++block) {
    WorkTile const t = work_tile(p.schedule, int(block));
    tiles.push_back({t.batch, t.head, t.m_block});
  }
  return tiles;
}

int quotient(int n, int divisor) {
  if (n < 0 || divisor < 1) throw std::invalid_argument("n must be at least 0 and divisor at least 1");
  return Divisor(divisor).quotient(n);
}

/// Byte offset of (row, column) in a tile by its layout, and by the arithmetic that ldmatrix addresses are made with.
template <int HeadDim>
std::array<uint32_t, 2> tile_offsets(int row, int column) {
  constexpr int kRows = 64;
  using Tile = LdmatrixTile<HeadDim, kRows, 2>;
  uint32_t const lane = Tile::lane_offset(row % 16, column % 16 / 8 * 8);
  return {Panels<HeadDim, 2>::template byte_offset<kRows>(row, column),
          Tile::piece(lane, row / 16, column / 16) + 2 * (column % 8)};
}

std::array<uint32_t, 2> smem_offsets(int head_dim, int row, int column) {
  if (row < 0 || row >= 64 || column < 0 || column >= head_dim) throw std::invalid_argument("outside the 64-row tile");
  switch (head_dim) {
    case 32:
      return tile_offsets<32>(row, column);
    case 64:
      return tile_offsets<64>(row, column);
    case 96:
      return tile_offsets<96>(row, column);
    case 128:
      return tile_offsets<128>(row, column);
    case 192:
      return tile_offsets<192>(row, column);
    case 256:
      return tile_offsets<256>(row, column);
    default:
      throw std::invalid_argument("no tile of head_dim " + std::to_string(head_dim));
  }
}

}  // namespace

void bind_host_model(py::module_& module) {
  py::module_ m = module.def_submodule("host", "The kernels' arithmetic, run on the host for tests.");
  m.def("online_softmax", &online_softmax, py::arg("scores"), py::arg("values"), py::arg("scale"), py::arg("row"),
        py::arg("diagonal"), py::arg("dtype"));
  m.def(
      "visible_keys",
      [](int row, int seqlen_k, std::optional<int> diagonal) {
        return visible_keys(lengths(row + 1, seqlen_k, diagonal), row);
      },
      py::arg("row"), py::arg("seqlen_k"), py::arg("diagonal"));
  m.def(
      "key_blocks",
      [](int row_begin, int row_end, int tile_n, int seqlen_q, int seqlen_k, std::optional<int> diagonal) {
        ForwardParams const p = lengths(seqlen_q, seqlen_k, diagonal);
        return std::array<int, 2>{key_blocks(p, row_begin, row_end, tile_n), full_key_blocks(p, row_begin, tile_n)};
      },
      "Blocks that rows [row_begin, row_end) walk, and how many of them need no mask.", py::arg("row_begin"),
      py::arg("row_end"), py::arg("tile_n"), py::arg("seqlen_q"), py::arg("seqlen_k"), py::arg("diagonal"));
  m.def("work_tiles", &work_tiles, "(batch, head, m_block) of every thread block, in launch order.", py::arg("batch"),
        py::arg("num_heads"), py::arg("seqlen_q"), py::arg("masked"), py::arg("tile_m"), py::arg("mixed_heads"),
        py::arg("long_tiles"));
  m.def(
      "tile_order",
      [](int sms, int64_t l2_bytes, int warps, int heads, int group, int64_t head_bytes, int tiles, int short_tiles) {
        TileOrder const order = tile_order({sms, l2_bytes}, warps, heads, group, head_bytes, tiles, short_tiles);
        return std::array<int, 2>{order.heads, order.tiles};
      },
      "(heads that are mixed, long tiles of each) of a launch.", py::arg("sms"), py::arg("l2_bytes"), py::arg("warps"),
      py::arg("heads"), py::arg("group"), py::arg("head_bytes"), py::arg("tiles"), py::arg("short_tiles"));
  m.def("short_tiles", &short_tiles, "Tiles with at most half as many keys as the last one.", py::arg("diagonal"),
        py::arg("seqlen_k"), py::arg("tile_m"), py::arg("tiles"));
  m.def("quotient", &quotient, "n / divisor by multiplication, as the kernels divide block numbers.", py::arg("n"),
        py::arg("divisor"));
  m.def("smem_offsets", &smem_offsets, "(by layout, by ldmatrix arithmetic) byte offset in a 64-row tile.",
        py::arg("head_dim"), py::arg("row"), py::arg("column"));
  bind_feature_host_model(m);
}

}  // namespace cutlass_fmha
