// The products of a warp: S = Q K^T and O += P V, by mma.m16n8k16. What every walk over keys shares: operands in
// registers, how lanes read them from shared memory, in what order they are multiplied.
#pragma once

#include "fragments.cuh"
#include "mma_passes.cuh"
#include "tile.cuh"

namespace cutlass_fmha {

/// A word that isn't there before all of a product is: then no B fragment of it is still being read.
template <class Accumulator>
CUTE_DEVICE uint32_t made_of(Accumulator const& accumulator) {
  uint32_t word = 0;
  CUTE_UNROLL
  for (int n = 0; n < cute::size<2>(accumulator); n += 2) word |= __float_as_uint(accumulator(0, 0, n));
  return word;
}

/// In place of where a block's shared memory begins: offsets are addresses there already.
struct SharedWindow {};
CUTE_DEVICE cute::uint128_t const& shared_at(SharedWindow, uint32_t address) {
  return *static_cast<cute::uint128_t const*>(__cvta_shared_to_generic(address));
}

/// The A operand of `Steps` 16-wide steps over all rows of a warp, and B operands of `Count` n16.
template <class T, int Steps>
using OperandA = decltype(cute::make_tensor<typename T::Element>(
    cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<T::kRowSteps>, cute::Int<Steps>>{}));
template <class T, int Count>
using OperandsB = decltype(cute::make_tensor<typename T::Element>(
    cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::_2, cute::Int<Count>>{}));

/// One n8 tile of a 16-wide step, for all rows of the warp.
template <class T, class A, class B, class Accumulator>
CUTE_DEVICE void multiply_n8(A const& a, B const& b, Accumulator& accumulator, int n) {
  using namespace cute;
  typename T::Mma mma;
  CUTE_UNROLL
  for (int m = 0; m < T::kRowSteps; ++m) gemm(mma, a(_, m), b, accumulator(_, m, n));
}

/// The two n8 tiles of a 16-wide step, for all rows of the warp: each B fragment is used kRowSteps times.
template <class T, class A, class B, class Accumulator>
CUTE_DEVICE void multiply(A const& a, B const& b, Accumulator& accumulator, int n) {
  using namespace cute;
  typename T::Mma mma;
  CUTE_UNROLL
  for (int m = 0; m < T::kRowSteps; ++m) {
    gemm(mma, a(_, m), b(_, 0), accumulator(_, m, 2 * n));
    gemm(mma, a(_, m), b(_, 1), accumulator(_, m, 2 * n + 1));
  }
}

/// A 16 x 16 piece of the tile that begins at `tile`, as it lies there or transposed. `lane`: Tile::lane_offset().
template <class Tile, bool Transposed = false, class Memory, class Fragment>
CUTE_DEVICE void load_piece(Memory smem, uint32_t tile, uint32_t lane, int row_step, int column_step,
                            Fragment&& fragment) {
  using Copy = cute::conditional_t<Transposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
  load_matrix<Copy>(smem, tile + Tile::piece(lane, row_step, column_step), fragment);
}

/// accumulator += A B, over `Steps` 16-wide steps and `Count` n16. read_a(step, fragment) is asked once a step, for all
/// rows of the warp, read_b(step, n, fragment) for each piece.
template <class T, int Steps, int Count, class ReadA, class ReadB, class Accumulator>
CUTE_DEVICE void add_product(ReadA const& read_a, ReadB const& read_b, Accumulator& accumulator) {
  using namespace cute;
  CUTE_UNROLL
  for (int step = 0; step < Steps; ++step) {
    OperandA<T, 1> a;
    read_a(step, a(_, _, 0));
    CUTE_UNROLL
    for (int n = 0; n < Count; ++n) {
      OperandsB<T, 1> b;
      read_b(step, n, b(_, _, 0));
      multiply<T>(a(_, _, 0), b(_, _, 0), accumulator, n);
    }
    repeat_mma_passes<typename T::Mma>(accumulator);
  }
}

/// Where operands come from tiles of shared memory: Q of C.tile_m rows, K and V of C.tile_n.
template <ForwardConfig C>
struct WarpProduct {
  using T = ForwardTypes<C>;
  using Element = typename T::Element;
  using Scores = typename T::ScoresFragment;
  using Output = typename T::OutputFragment;
  using QTile = LdmatrixTile<C.head_dim, C.tile_m, C.element_bytes()>;
  using KTile = LdmatrixTile<C.head_dim, C.tile_n, C.element_bytes()>;
  using VTile = LdmatrixTile<C.head_dim_v(), C.tile_n, C.element_bytes()>;
  using QStep = OperandA<T, 1>;
  using QFragments = OperandA<T, C.q_in_registers ? T::kDimSteps : 1>;  ///< of the whole walk, or unused
  using Probabilities = OperandA<T, T::kKeySteps>;

  static constexpr uint32_t kQRowBytes = QTile::P::kRowBytes;

  // Lane offsets, in bytes: of Q, whose rows begin at `tile_row`, of K and of V.
  template <class Lane>
  CUTE_DEVICE static uint32_t q_lane(Lane lane, int tile_row) {
    return QTile::lane_offset(MatrixLane::rows_first(lane)) + tile_row * kQRowBytes;
  }
  template <class Lane>
  CUTE_DEVICE static uint32_t k_lane(Lane lane) {
    return KTile::lane_offset(MatrixLane::columns_first(lane));
  }
  template <class Lane>
  CUTE_DEVICE static uint32_t v_lane(Lane lane) {
    return VTile::lane_offset(MatrixLane::rows_first(lane));
  }

  // 16 x 16 pieces by those: dimensions 16 * step of all rows of Q; the same and keys 16 * n of K; keys 16 * step and
  // dimensions 16 * n of V. `tile`: where it begins. `Memory`: char const*, or SharedWindow.
  template <class Memory, class Fragment>
  CUTE_DEVICE static void load_q(Memory smem, uint32_t lane, int step, Fragment&& fragment) {
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_piece<QTile>(smem, 0, lane, m, step, fragment(cute::_, m));
    }
  }
  template <class Memory, class Fragment>
  CUTE_DEVICE static void load_k(Memory smem, uint32_t tile, uint32_t lane, int step, int n, Fragment&& fragment) {
    load_piece<KTile>(smem, tile, lane, n, step, fragment);
  }
  template <class Memory, class Fragment>
  CUTE_DEVICE static void load_v(Memory smem, uint32_t tile, uint32_t lane, int step, int n, Fragment&& fragment) {
    load_piece<VTile, true>(smem, tile, lane, step, n, fragment);
  }

  /// Q for the whole walk, where it is kept in registers.
  CUTE_DEVICE static void keep_q(char const* smem, uint32_t lane, QFragments& kept) {
    if constexpr (C.q_in_registers) {
      CUTE_UNROLL
      for (int step = 0; step < T::kDimSteps; ++step) load_q(smem, lane, step, kept(cute::_, cute::_, step));
    }
  }

  /// scores = Q K^T. read_q(step, fragment) is asked where Q isn't kept; read_k(step, n, fragment) for each piece.
  /// before(step, n) is called before it is multiplied.
  template <class ReadQ, class ReadK, class Before>
  CUTE_DEVICE static void query_keys(QFragments const& kept, ReadQ const& read_q, ReadK const& read_k,
                                     Before const& before, Scores& scores) {
    using namespace cute;
    clear(scores);
    CUTE_UNROLL
    for (int step = 0; step < T::kDimSteps; ++step) {
      QStep q;
      if constexpr (C.q_in_registers) {
        copy(kept(_, _, step), q(_, _, 0));
      } else {
        read_q(step, q(_, _, 0));
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kKeySteps; ++n) {
        OperandsB<T, 1> k;
        read_k(step, n, k(_, _, 0));
        before(step, n);
        multiply<T>(q(_, _, 0), k(_, _, 0), scores, n);
      }
      repeat_mma_passes<typename T::Mma>(scores);
    }
  }

  /// The same of tiles in shared memory, one after the other.
  CUTE_DEVICE static void query_tile(char const* smem, QFragments const& kept, uint32_t q_lane, uint32_t k_tile,
                                     uint32_t k_lane, Scores& scores) {
    query_keys(
        kept, [&](int step, auto&& q) FMHA_INLINE { load_q(smem, q_lane, step, q); },
        [&](int step, int n, auto&& k) FMHA_INLINE { load_k(smem, k_tile, k_lane, step, n, k); },
        [](int, int) FMHA_INLINE {}, scores);
  }

  /// output += P V. read_v(step, n, fragment) for each piece; with `LastAtOnce`, for all of the last step before any of
  /// it is multiplied, and then all_read() is called.
  template <bool LastAtOnce, class ReadV, class AllRead>
  CUTE_DEVICE static void add_values(Probabilities const& probabilities, ReadV const& read_v, AllRead const& all_read,
                                     Output& output) {
    using namespace cute;
    CUTE_UNROLL
    for (int step = 0; step < T::kKeySteps; ++step) {
      OperandsB<T, T::kValueSteps> v;
      bool const at_once = LastAtOnce && step == T::kKeySteps - 1;
      if (at_once) {
        CUTE_UNROLL
        for (int n = 0; n < T::kValueSteps; ++n) read_v(step, n, v(_, _, n));
        all_read();
      }
      CUTE_UNROLL
      for (int n = 0; n < T::kValueSteps; ++n) {
        if (!at_once) read_v(step, n, v(_, _, n));
        multiply<T>(probabilities(_, _, step), v(_, _, n), output, n);
      }
      repeat_mma_passes<typename T::Mma>(output);
    }
  }

  /// The same of a tile in shared memory.
  CUTE_DEVICE static void add_tile(char const* smem, Probabilities const& probabilities, uint32_t v_tile,
                                   uint32_t v_lane, Output& output) {
    add_values<false>(
        probabilities, [&](int step, int n, auto&& v) FMHA_INLINE { load_v(smem, v_tile, v_lane, step, n, v); },
        []() FMHA_INLINE {}, output);
  }
};

/// Moves the sign of the softmax scale into a tile of Q: see SplitScale.
template <ForwardConfig C, class Params>
CUTE_DEVICE void transform_q(Params const& p, char* smem) {
  if (p.q_and == 0xffffffffu && p.q_xor == 0u) return;
  for (int i = threadIdx.x; i < C.tile_m * C.head_dim * C.element_bytes() / 4; i += C.threads()) {
    uint32_t& pair = reinterpret_cast<uint32_t*>(smem)[i];
    pair = (pair & p.q_and) ^ p.q_xor;
  }
  __syncthreads();
}

}  // namespace cutlass_fmha
