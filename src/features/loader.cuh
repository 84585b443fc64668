// Tiles of q, k and v on their way to shared memory, wherever their rows stand: one after another, in pages, or packed
// from several heads.
#pragma once

#include "../core/tile.cuh"

namespace cutlass_fmha {

/// Fills a tile of `Rows` rows with `Threads` threads. Rows that aren't there and dimensions from `head_dim` on become
/// zeros, which keeps what the mma sees finite.
template <int HeadDim, int Rows, int Threads, int ElementBytes>
struct RowLoader {
  using Element = Bits<ElementBytes>;
  using P = Panels<HeadDim, ElementBytes>;
  static constexpr int kRowsPerPass = Threads / P::kChunks;
  static constexpr int kPasses = cute::ceil_div(Rows, kRowsPerPass);
  static_assert(kRowsPerPass % 8 == 0, "a pass must keep a thread's swizzle pattern");

  // A thread has one column of chunks, and one row of each pass.
  CUTE_DEVICE static int first_row(int thread) { return thread / P::kChunks; }
  CUTE_DEVICE static int column(int thread) { return thread % P::kChunks * P::kChunk; }
  /// Where a thread's chunk of its first row stands in a tile, in bytes.
  CUTE_DEVICE static uint32_t first_chunk(int thread) {
    return P::template byte_offset<Rows>(first_row(thread), column(thread));
  }

  /// row_at(row): where the row's first element stands, null for one that isn't there. `any`: an address that may be
  /// named, not read, for those. `vectors`: rows are aligned to 16 bytes and head_dim is a multiple of 8.
  template <class RowAt>
  CUTE_DEVICE static void load(char* tile, Element const* any, int head_dim, bool vectors, RowAt const& row_at,
                               int thread = threadIdx.x) {
    int const first_row = thread / P::kChunks;
    int const column = thread % P::kChunks * P::kChunk;
    char* const to = tile + first_chunk(thread);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int const row = first_row + pass * kRowsPerPass;
      if (Rows % kRowsPerPass != 0 && row >= Rows) break;
      Element const* from = row_at(row);
      bool const there = from != nullptr;
      from = (there ? from : any) + column;
      load_row(to, pass, from, there ? head_dim - column : 0, vectors);
    }
  }

  /// Rows [begin, begin + Rows) of those that begin at `from`, `stride` apart, of which `count` are there. All are
  /// aligned to 16 bytes. For what every block does before anything else: few instructions a row.
  CUTE_DEVICE static void load_leading(char* tile, Element const* from, int64_t stride, int begin, int count,
                                       int head_dim, int thread = threadIdx.x) {
    static_assert(Rows % kRowsPerPass == 0);
    char* const to = tile + first_chunk(thread);
    int const dimensions = head_dim - column(thread), first = begin + first_row(thread);
    Element const* const any = from + column(thread);
    Element const* row = any + first * stride;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      bool const there = first + pass * kRowsPerPass < count;
      load_vectors(to, pass, there ? row : any, there ? dimensions : 0);
      row += kRowsPerPass * stride;
    }
  }

  /// A tile all of whose rows are there, with all dimensions, row n at from + Order::of_row(n) * stride. `from`: this
  /// thread's chunk of its first row.
  template <class Order>
  CUTE_DEVICE static void load_whole(char* to, Element const* from, int64_t stride) {
    static_assert(Rows % kRowsPerPass == 0);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      Element const* const row = from + Order::of_row(pass * kRowsPerPass) * stride;
      CUTE_UNROLL
      for (int panel = 0; panel < P::kCount; ++panel) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(row + panel * P::kWidth),
            *reinterpret_cast<cute::uint128_t*>(to + (panel * Rows + pass * kRowsPerPass) * P::kRowBytes));
      }
    }
  }

  /// The same where rows have so many `dimensions` from the thread's column on: the rest of a tile's rows are zeros.
  template <class Order>
  CUTE_DEVICE static void load_dimensions(char* to, Element const* from, int64_t stride, int dimensions) {
    static_assert(Rows % kRowsPerPass == 0);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      load_vectors(to, pass, from + Order::of_row(pass * kRowsPerPass) * stride, dimensions);
    }
  }
  CUTE_DEVICE static void load_vectors(char* to, int pass, Element const* from, int dimensions) {
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(from + panel * P::kWidth),
          *reinterpret_cast<cute::uint128_t*>(to + (panel * Rows + pass * kRowsPerPass) * P::kRowBytes),
          dimensions > panel * P::kWidth);
    }
  }

  /// This thread's chunks of one pass. `elements`: so many of the row exist from its column on; 0 or fewer, none, and
  /// then `from` isn't read.
  CUTE_DEVICE static void load_row(char* to, int pass, Element const* from, int elements, bool vectors) {
    CUTE_UNROLL
    for (int panel = 0; panel < P::kCount; ++panel) {
      char* const chunk = to + (panel * Rows + pass * kRowsPerPass) * P::kRowBytes;
      copy_chunk(chunk, from + panel * P::kWidth, elements - panel * P::kWidth, vectors);
    }
  }

 private:
  CUTE_DEVICE static void copy_chunk(char* to, Element const* from, int elements, bool vectors) {
    auto& smem = *reinterpret_cast<cute::uint128_t*>(to);
    if (vectors) {
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<cute::uint128_t const*>(from),
                                                                   smem, elements > 0);
      return;
    }
    auto* const chunk = reinterpret_cast<Element*>(to);
    CUTE_NO_UNROLL
    for (int e = 0; e < P::kChunk; ++e) chunk[e] = e < elements ? from[e] : Element(0);
  }
};

}  // namespace cutlass_fmha
