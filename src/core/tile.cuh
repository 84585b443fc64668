// Tiles of elements of one size in shared memory: their swizzled layout, how they are filled from global memory, and
// how a warp reads them with ldmatrix.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/tensor.hpp>

#include "../config.h"

namespace cutlass_fmha {

/// Elements where nothing is computed with them.
template <int ElementBytes>
using Bits = cute::uint_bit_t<8 * ElementBytes>;

/// Columns are cut into panels, so that a row of a panel is 128 (or 64) bytes and the XOR swizzle spreads the same
/// 16-byte chunk of eight rows over all banks: ldmatrix and 16-byte copies are free of conflicts.
template <int HeadDim, int ElementBytes>
struct Panels {
  static constexpr int kRowBytes = HeadDim * ElementBytes % 128 == 0 ? 128 : 64;
  static constexpr int kWidth = kRowBytes / ElementBytes;  ///< columns of a panel
  static constexpr int kCount = HeadDim / kWidth;
  static constexpr int kChunk = 16 / ElementBytes;  ///< columns of a chunk
  static constexpr int kChunks = kRowBytes / 16;    ///< of a panel's row
  static_assert(ElementBytes == 1 || ElementBytes == 2, "the columns of a chunk are 16 or 8");
  using Atom = decltype(cute::composition(
      cute::Swizzle<kChunks == 8 ? 3 : 2, kChunk == 8 ? 3 : 4, 3>{},
      cute::Layout<cute::Shape<cute::_8, cute::Int<kWidth>>, cute::Stride<cute::Int<kWidth>, cute::_1>>{}));

  /// (row, column) -> element offset of a tile of `Rows` rows.
  template <int Rows>
  using Layout = decltype(cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<Rows>, cute::Int<HeadDim>>{}));
  /// The same in bytes.
  template <int Rows>
  CUTE_HOST_DEVICE static uint32_t byte_offset(int row, int column) {
    return ElementBytes * uint32_t(Layout<Rows>{}(row, column));
  }
};

/// Where a lane's row begins among the four 8 x 8 matrices that ldmatrix.x4 reads of a 16 x 16 piece.
struct MatrixLane {
  int row, column;

  /// Rows first: A operands, and (transposed) B operands whose columns are the tile's, as V is for P V. `lane`: 0 ..
  /// 31, or without a sign the number of a thread.
  template <class Lane>
  CUTE_HOST_DEVICE static constexpr MatrixLane rows_first(Lane lane) {
    return {int(lane % 16), int(half(lane) * 8)};
  }
  /// Columns first: B operands whose columns are the tile's rows, as K is for Q K^T. b0 and b1 of an n8 tile must be
  /// neighbouring registers.
  template <class Lane>
  CUTE_HOST_DEVICE static constexpr MatrixLane columns_first(Lane lane) {
    return {int(lane % 8 + half(lane) * 8), int(lane / 8 % 2 * 8)};
  }

 private:
  CUTE_HOST_DEVICE static constexpr int half(int lane) { return lane / 16; }
  CUTE_HOST_DEVICE static constexpr unsigned half(unsigned thread) { return thread % 32 / 16; }
};

/// Byte offsets for ldmatrix.x4, which reads a piece of a tile, 16 rows of 32 bytes: `lane_offset` is the lane's
/// address for the piece at (0, 0), and those of all others follow from it. A step of 32 bytes only flips bits of the
/// chunk number, a step of 16 rows (and the tile's own start, a multiple of 128 bytes) is a uniform addend: one
/// register per lane instead of one per piece, which is what the main loop has room for.
template <int HeadDim, int Rows, int ElementBytes>
struct LdmatrixTile {
  using P = Panels<HeadDim, ElementBytes>;
  static constexpr int kRows = Rows, kStepsPerPanel = P::kChunks / 2;

  CUTE_HOST_DEVICE static uint32_t lane_offset(int row, int column) {
    return P::template byte_offset<Rows>(row, column);
  }
  CUTE_HOST_DEVICE static uint32_t lane_offset(MatrixLane at) { return lane_offset(at.row, at.column); }
  CUTE_HOST_DEVICE static uint32_t piece(uint32_t lane_offset, int row_step, int column_step) {
    return (lane_offset ^ ((column_step % kStepsPerPanel) * 32)) +
           (column_step / kStepsPerPanel) * (Rows * P::kRowBytes) + row_step * (16 * P::kRowBytes);
  }
};

CUTE_DEVICE cute::uint128_t const& shared_at(char const* smem, uint32_t offset) {
  return *reinterpret_cast<cute::uint128_t const*>(smem + offset);
}

/// One ldmatrix.x4 into a fragment of four registers.
template <class CopyOp, class Memory, class Fragment>
CUTE_DEVICE void load_matrix(Memory smem, uint32_t offset, Fragment&& fragment) {
  auto registers = cute::make_tensor(cute::recast<uint32_t>(fragment).data(), cute::Layout<cute::_4>{});
  CopyOp::copy(shared_at(smem, offset), registers(0), registers(1), registers(2), registers(3));
}

/// Copies a tile of up to `Rows` rows from global to shared memory with `Threads` threads, 16 bytes at a time. Each
/// thread has one chunk column and steps through rows; a warp reads whole 128-byte (64-byte) row segments.
template <int HeadDim, int Rows, int Threads, Copy kCopy, int ElementBytes>
struct TileLoader {
  using Element = Bits<ElementBytes>;
  using P = Panels<HeadDim, ElementBytes>;
  static constexpr int kRowsPerPass = Threads / P::kChunks;
  static_assert(kRowsPerPass % 8 == 0 && Rows % kRowsPerPass == 0, "a pass must keep a thread's swizzle pattern");

  Element const* source;  ///< this thread's chunk of the tile's first row and panel
  int row;
  uint32_t destination;  ///< byte offset of that chunk within a tile

  CUTE_DEVICE TileLoader(void const* tensor, int64_t row_stride, int thread) {
    row = thread / P::kChunks;
    int const column = thread % P::kChunks * P::kChunk;
    source = static_cast<Element const*>(tensor) + row * row_stride + column;
    destination = P::template byte_offset<Rows>(row, column);
  }

  /// `Partial`: rows from `valid_rows` on are filled with zeros, which keeps what the mma sees finite. `row_stride`
  /// comes straight from the kernel's parameters, i.e. from constant memory: as a member it would cost two registers.
  template <bool Partial>
  CUTE_DEVICE void load(char* tile, int64_t row_stride, int valid_rows = Rows) const {
    char* const to = tile + destination;
    CUTE_UNROLL
    for (int pass = 0; pass < Rows / kRowsPerPass; ++pass) {
      Element const* const from = source + pass * kRowsPerPass * row_stride;
      bool const valid = !Partial || row + pass * kRowsPerPass < valid_rows;
      CUTE_UNROLL
      for (int panel = 0; panel < P::kCount; ++panel) {
        copy_chunk<Partial>(to + (panel * Rows + pass * kRowsPerPass) * P::kRowBytes, from + panel * P::kWidth, valid);
      }
    }
  }

 private:
  template <bool Partial>
  CUTE_DEVICE static void copy_chunk(char* to, Element const* from, bool valid) {
    auto& smem = *reinterpret_cast<cute::uint128_t*>(to);
    if constexpr (kCopy == Copy::cp_async_16) {
      auto const& gmem = *reinterpret_cast<cute::uint128_t const*>(from);
      if constexpr (Partial) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(gmem, smem, valid);
      } else {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(gmem, smem);
      }
    } else {
      cute::array_aligned<Element, P::kChunk> chunk;
      CUTE_UNROLL
      for (int i = 0; i < P::kChunk; ++i) chunk[i] = valid ? from[i] : Element(0);
      smem = *reinterpret_cast<cute::uint128_t const*>(chunk.data());
    }
  }
};

}  // namespace cutlass_fmha
