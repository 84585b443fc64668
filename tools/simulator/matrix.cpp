// mma, ldmatrix and stmatrix. In a register of a warp, the 4 bytes of lane l are part l % 4 of row l / 4 of a matrix
// with 8 rows of 16 bytes: all lanes' one after the other, the matrix lies there row by row.
#include <cstring>

#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

float from_tfloat32(uint32_t x) { return std::bit_cast<float>(x & ~0x1fffu); }  // the last 13 bits don't count

/// The matrix of a register as floats at `to`, which are so far apart in a row and in a column.
template <class T, auto widen, int next_row, int next_column>
void widen_matrix(Lanes<uint32_t> const& from, float* to) {
  auto const* const elements = reinterpret_cast<T const*>(from.lane);
  for (int row = 0; row < 8; ++row) {
    constexpr int kColumns = 16 / sizeof(T);
    for (int k = 0; k < kColumns; ++k) to[row * next_row + k * next_column] = widen(elements[row * kColumns + k]);
  }
}

/// D = A B + C in fp32, with C and D [16, 8], A [16, depth] and B [depth, 8]. `blocks` registers hold B, a block of its
/// rows each, and twice as many A: of each block of its columns, the upper and the lower rows. Operands: D, A, B, C.
template <class T, auto widen, int blocks>
void multiply(Warp& w, Instruction const& i) {
  w.require(kAllLanes);
  constexpr int kColumns = 16 / sizeof(T), kDepth = kColumns * blocks;
  uint32_t const* const places = i.operand + 4;
  alignas(64) float a[16][kDepth], b[kDepth][8], sum[16][8] = {};
  for (int block = 0; block < blocks; ++block) {
    int const column = block * kColumns;
    widen_matrix<T, widen, kDepth, 1>(w.at<uint32_t>(places[2 * block]), &a[0][column]);
    widen_matrix<T, widen, kDepth, 1>(w.at<uint32_t>(places[2 * block + 1]), &a[8][column]);
    widen_matrix<T, widen, 1, 8>(w.at<uint32_t>(places[2 * blocks + block]), b[column]);
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDepth; ++k) {
      for (int n = 0; n < 8; ++n) sum[row][n] = std::fma(a[row][k], b[k][n], sum[row][n]);
    }
  }
  // The products first, and their sum to the accumulator: the error grows with the number of mma, as a tensor core's.
  // Element 2 t + e of row g, and of row g + 8, are lane 4 g + t's of registers e and 2 + e.
  for (int e = 0; e < 4; ++e) {
    Lanes<float> const& from = w.at<float>(places[3 * blocks + e]);
    Lanes<float> result;
    for (int lane = 0; lane < kLanes; ++lane) {
      result[lane] = canonical(from[lane] + sum[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2]);
    }
    w.at<float>(i.operand[e]) = result;
  }
}

template <class T, auto widen, int blocks>
void add_mma(Opcodes& ops, std::string const& type) {
  std::string const shape = ".m16n8k" + std::to_string(16 / sizeof(T) * blocks);
  Slot const matrix = in<uint32_t>(), sum = in<float>().of(4);
  ops.add({"mma.sync.aligned" + shape + ".row.col.f32." + type + "." + type + ".f32"}, multiply<T, widen, blocks>,
          {out<float>().of(4), matrix.of(2 * blocks), matrix.of(blocks), sum});
}

/// Row r of matrix m is at the address that lane 8 m + r gives.
template <bool transposed>
void load_matrices(Warp& w, Instruction const& i) {
  w.require(kAllLanes);
  alignas(16) uint16_t matrices[4][8][8];
  for (int row = 0; row < kLanes; ++row) {
    uint32_t const address = shared_address_of(w, i.address[0], row);
    std::memcpy(matrices[row / 8][row % 8], w.block.shared(w, address, 16), 16);
  }
  for (int m = 0; m < 4; ++m) {
    for (int r = 0; r < 8 && transposed; ++r) {
      for (int c = 0; c < r; ++c) std::swap(matrices[m][r][c], matrices[m][c][r]);
    }
    std::memcpy(&w.at<uint32_t>(i.operand[m]), matrices[m], sizeof(matrices[m]));
  }
}

/// The inverse: each row goes where its lane says.
void store_matrices(Warp& w, Instruction const& i) {
  w.require(kAllLanes);
  for (int row = 0; row < kLanes; ++row) {
    uint32_t const address = shared_address_of(w, i.address[0], row);
    std::memcpy(w.block.shared(w, address, 16), &w.at<uint32_t>(i.operand[row / 8])[row % 8 * 4], 16);
  }
}

}  // namespace

void add_matrix(Opcodes& ops) {
  add_mma<uint16_t, from_float16, 1>(ops, "f16");
  add_mma<uint16_t, from_float16, 2>(ops, "f16");
  add_mma<uint16_t, from_bfloat16, 1>(ops, "bf16");
  add_mma<uint16_t, from_bfloat16, 2>(ops, "bf16");
  add_mma<uint32_t, from_tfloat32, 2>(ops, "tf32");
  std::vector<Slot> const loaded{out<uint32_t>().of(4), kAddress};
  ops.add({"ldmatrix.sync.aligned.x4.m8n8.shared.b16"}, load_matrices<false>, loaded);
  ops.add({"ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16"}, load_matrices<true>, loaded);
  ops.add({"stmatrix.sync.aligned.x4.m8n8.shared.b16"}, store_matrices, {kAddress, in<uint32_t>().of(4)});
}

}  // namespace simulator
