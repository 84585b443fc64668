// mma, ldmatrix and stmatrix. In a register of a warp, the 4 bytes of lane l are part l % 4 of row l / 4 of a matrix
// with 8 rows of 16 bytes: all lanes' one after the other, the matrix lies there row by row.
#include <immintrin.h>

#include <cstring>

#include "block.h"
#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

// Of each element type: how many columns a register's matrix of 8 rows has, and a row of it as floats.
struct Half {
  static constexpr int kColumns = 8;
  static void widen(__m128i row, float* to) { _mm256_storeu_ps(to, _mm256_cvtph_ps(row)); }
};
struct Bfloat16 {
  static constexpr int kColumns = 8;
  static void widen(__m128i row, float* to) {
    _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(row), 16)));
  }
};
struct Tfloat32 {  // a float of which the last 13 bits don't count
  static constexpr int kColumns = 4;
  static void widen(__m128i row, float* to) {
    _mm_storeu_ps(to, _mm_castsi128_ps(_mm_and_si128(row, _mm_set1_epi32(~0x1fff))));
  }
};

/// The matrix of a register as floats at `to`, whose rows are `stride` floats apart.
template <class T>
void widen_matrix(Lanes<uint32_t> const& from, float* to, int stride) {
  for (int row = 0; row < 8; ++row) {
    T::widen(_mm_load_si128(reinterpret_cast<__m128i const*>(&from.lane[4 * row])), to + row * stride);
  }
}

/// D = A B + C in fp32, with C and D [16, 8], A [16, depth] and B [depth, 8]. `blocks` registers hold B, a block of its
/// rows each, and twice as many A: of each block of its columns, the upper and the lower rows. Operands: D, A, B, C.
template <class T, int blocks>
void multiply(Warp& w, Instruction const& i) {
  w.require(kAllLanes);
  constexpr int kDepth = T::kColumns * blocks;
  uint32_t const *const a_places = i.operand + 4, *const b_places = a_places + 2 * blocks,
                        *const c_places = b_places + blocks;
  alignas(64) float a[16][kDepth], b[8][kDepth], b_transposed[kDepth][8], c[16][8];
  for (int block = 0; block < blocks; ++block) {
    int const column = block * T::kColumns;
    widen_matrix<T>(w.at<uint32_t>(a_places[2 * block]), &a[0][column], kDepth);
    widen_matrix<T>(w.at<uint32_t>(a_places[2 * block + 1]), &a[8][column], kDepth);
    widen_matrix<T>(w.at<uint32_t>(b_places[block]), &b[0][column], kDepth);
  }
  for (int k = 0; k < kDepth; ++k) {
    for (int n = 0; n < 8; ++n) b_transposed[k][n] = b[n][k];
  }
  // Element 2 t + e of row g, and of row g + 8, are lane 4 g + t's of registers e and 2 + e.
  for (int e = 0; e < 4; ++e) {
    Lanes<float> const& from = w.at<float>(c_places[e]);
    for (int lane = 0; lane < kLanes; ++lane) c[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2] = from[lane];
  }
  for (int row = 0; row < 16; row += 8) {
    // The products first, and their sum to the accumulator: the error grows with the number of mma, as a tensor core's.
    __m256 sum[8];
    for (int r = 0; r < 8; ++r) sum[r] = _mm256_setzero_ps();
    for (int k = 0; k < kDepth; ++k) {
      __m256 const factors = _mm256_load_ps(b_transposed[k]);
      for (int r = 0; r < 8; ++r) sum[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(&a[row + r][k]), factors, sum[r]);
    }
    for (int r = 0; r < 8; ++r) _mm256_store_ps(c[row + r], _mm256_add_ps(_mm256_load_ps(c[row + r]), sum[r]));
  }
  for (int e = 0; e < 4; ++e) {
    Lanes<float>& to = w.at<float>(i.operand[e]);
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = canonical(c[lane / 4 + e / 2 * 8][lane % 4 * 2 + e % 2]);
  }
}

template <class T, int blocks>
void add_mma(Opcodes& ops, std::string const& type) {
  std::string const shape = ".m16n8k" + std::to_string(T::kColumns * blocks);
  Slot const matrix = in<uint32_t>(), sum = in<float>().of(4);
  ops.add({"mma.sync.aligned" + shape + ".row.col.f32." + type + "." + type + ".f32"}, multiply<T, blocks>,
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
  add_mma<Half, 1>(ops, "f16");
  add_mma<Half, 2>(ops, "f16");
  add_mma<Bfloat16, 1>(ops, "bf16");
  add_mma<Bfloat16, 2>(ops, "bf16");
  add_mma<Tfloat32, 2>(ops, "tf32");
  std::vector<Slot> const loaded{out<uint32_t>().of(4), kAddress};
  ops.add({"ldmatrix.sync.aligned.x4.m8n8.shared.b16"}, load_matrices<false>, loaded);
  ops.add({"ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16"}, load_matrices<true>, loaded);
  ops.add({"stmatrix.sync.aligned.x4.m8n8.shared.b16"}, store_matrices, {kAddress, in<uint32_t>().of(4)});
}

}  // namespace simulator
