// What the warps of a backward do, in whatever order: tiles that come to shared memory, the five products, and what
// becomes of scores.
#pragma once

#include "../core/tma.cuh"
#include "../features/loader.cuh"
#include "layout.cuh"
#include "scores.cuh"

namespace cutlass_fmha {

/// Tiles of queries in the order of the walk: those of a query head after those of the one before.
struct QueryCursor {
  int tile, head;  ///< head: of those that share the block's keys
  int number = 0;  ///< of steps

  CUTE_DEVICE QueryCursor next(QueryWalk const& walk) const {
    bool const last = tile + 1 == walk.first + walk.tiles;
    return {last ? walk.first : tile + 1, last ? head + 1 : head, number + 1};
  }
};

template <BackwardConfig C>
struct BackwardParts {
  template <int Chunk>
  using Types = BackwardTypes<C, Chunk>;
  using T = Types<16>;  ///< what doesn't depend on the queries
  using Q = QueryGradientTypes<C>;
  using Layout = BackwardLayout<C>;
  using Gradient = KeyGradient<C>;
  using Values = OperandA<T, T::kDimSteps>;
  using KTile = LdmatrixTile<C.head_dim, C.tile_n, C.element_bytes()>;
  using QTile = LdmatrixTile<C.head_dim, C.unit(), C.element_bytes()>;  ///< of dO, too
  using ScoresTile = LdmatrixTile<C.tile_m, C.tile_n, C.element_bytes()>;
  using KeyLoader = RowLoader<C.head_dim, C.tile_n, C.threads(), C.element_bytes()>;
  static constexpr bool kStoresMatrices = C.groups > 1 && C.arch >= 90;  ///< dS, by stmatrix
  static constexpr bool kMultipliesPairs = C.rounded_pairs && C.dtype == DType::bfloat16;
  /// Behind scores no branch is about what is hidden: exponentials begin among their last mma.
  static constexpr bool kHidesBehind = C.groups > 1;
  static_assert(!C.rounded_pairs || C.arch >= 90, "mul.bf16x2 begins there");
  static_assert(C.unit() % C.chunk == 0 && C.chunk % 16 == 0 && C.keys_per_warp() % 16 == 0);

  BackwardParams const& params;
  char* const smem;
  int const warp;  ///< of its group
  // Where a lane reads a piece of a tile, in bytes: A operands and transposed B operands; B operands; dS, transposed.
  uint32_t rows_first, columns_first, scores_columns_first;
  uint32_t scores_lane;  ///< where a lane's elements of an accumulator stand in a tile of dS

  CUTE_DEVICE BackwardParts(BackwardParams const& p, char* smem, int warp) : params(p), smem(smem), warp(warp) {
    find_lanes();
  }

  CUTE_DEVICE void find_lanes() {
    int const lane = lane_id();
    rows_first = QTile::lane_offset(MatrixLane::rows_first(lane));
    columns_first = QTile::lane_offset(MatrixLane::columns_first(lane));
    scores_columns_first = ScoresTile::lane_offset(MatrixLane::columns_first(lane));
    scores_lane = ScoresTile::lane_offset(lane / 4, lane % 4 * 2);
  }

  CUTE_DEVICE uint32_t barriers() const { return cute::cast_smem_ptr_to_uint(smem + Layout::kBarriers); }
  CUTE_DEVICE typename Layout::Place const& place() const { return Layout::place(smem); }

  // ---- the walk: lists of its tiles, or all of a range

  CUTE_DEVICE QueryCursor listed(int number) const {
    ListedTile const& entry = place().listed[number];
    return {entry.tile, entry.head, number};
  }
  CUTE_DEVICE QueryCursor first(QueryWalk const& walk) const {
    if constexpr (C.scored()) {
      if (params.listed != nullptr) return listed(0);
    }
    return {walk.first, 0};
  }
  /// Behind the last, a tile that means nothing.
  CUTE_DEVICE QueryCursor after(QueryCursor const& at, QueryWalk const& walk) const {
    if constexpr (C.scored()) {
      if (params.listed != nullptr) return listed(at.number + 1);
    }
    return at.next(walk);
  }

  // ---- what comes to shared memory

  CUTE_DEVICE void load_keys(void const* tensor, Strides const& stride, int tile, int head_dim) const {
    Sequence const& s = place().sequence;
    auto const* const from = static_cast<uint16_t const*>(tensor) + s.entry_k * stride.batch +
                             place().head_kv * stride.head + int64_t(s.first_k + place().key_begin) * stride.seqlen;
    int const there = s.keys - place().key_begin;
    KeyLoader::load(smem + tile, from, head_dim, true,
                    [&](int row) { return row < there ? from + row * stride.seqlen : nullptr; });
  }

  /// The number of a thread of `Threads`. Rows that have no register to keep it in read it anew.
  template <int Threads>
  CUTE_DEVICE static int thread_of() {
    return (kStoresMatrices ? thread_id() : threadIdx.x) % Threads;
  }
  /// A unit's queries, from row `row` of a tile on, by `Threads` threads.
  template <int Threads>
  CUTE_DEVICE void load_queries(uint16_t const* first, Strides const& stride, QueryCursor const& at, int row,
                                uint32_t tile, int head_dim) const {
    int const begin = at.tile * C.tile_m + row, there = place().sequence.queries - begin;
    auto const* const from = first + at.head * stride.head + begin * stride.seqlen;
    RowLoader<C.head_dim, C.unit(), Threads, C.element_bytes()>::load(
        smem + tile, from, head_dim, true, [&](int r) { return r < there ? from + r * stride.seqlen : nullptr; },
        thread_of<Threads>());
  }
  /// Whether the copy unit brings a tile: not one with rows behind the sequence, whatever stands there.
  CUTE_DEVICE bool comes_by_tma(QueryCursor const& at) const {
    return C.copy == Copy::tma && (at.tile + 1) * C.tile_m <= place().sequence.queries;
  }
  /// By one thread, which arrives at the barrier once, `barrier` bytes from barriers() on. A unit's queries, from row
  /// `row` of such a tile on.
  CUTE_DEVICE void request_queries(TensorMap const& map, int barrier, QueryCursor const& at, int row,
                                   uint32_t tile) const {
    using Tile = TmaTile<C.head_dim, C.unit(), C.element_bytes()>;
    KeyTile const& here = place();
    // What other tiles left there by cp.async comes before.
    if (here.sequence.queries % C.tile_m != 0) cute::tma_store_fence();
    Tile::load(map, reinterpret_cast<uint64_t*>(smem + Layout::kBarriers + barrier), smem + tile, Tile::kPanelBytes,
               here.sequence.first_q + at.tile * C.tile_m + row, here.head + at.head, here.sequence.entry_q);
  }
  CUTE_DEVICE BackwardTmaParams const& maps() const { return static_cast<BackwardTmaParams const&>(params); }

  /// The terms of a unit's rows, from row `row` of a tile on.
  template <int Threads>
  CUTE_DEVICE void load_terms(QueryCursor const& at, int row, uint32_t to) const {
    int const thread = thread_of<Threads>();
    if (thread >= kTermsOfQuery * C.unit() / 4) return;
    float const* const from = place().terms + tile_number(at) * (kTermsOfQuery * C.tile_m) + kTermsOfQuery * row;
    cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(
        reinterpret_cast<cute::uint128_t const*>(from)[thread],
        *reinterpret_cast<cute::uint128_t*>(smem + to + thread * 16));
  }

  /// Of a query tile in the workspace, counted from the sequence's first of the first head on.
  CUTE_DEVICE int64_t tile_number(QueryCursor const& at) const { return at.head * params.head_tiles + at.tile; }

  // ---- operands

  template <class Fragment>
  CUTE_DEVICE void read_keys(uint32_t tile, int step, Fragment&& fragment) const {
    CUTE_UNROLL
    for (int m = 0; m < T::kRowSteps; ++m) {
      load_piece<KTile>(smem, tile + warp * C.keys_per_warp() * KTile::P::kRowBytes, rows_first, m, step,
                        fragment(cute::_, m));
    }
  }
  /// V for the whole walk, from where it stands before.
  CUTE_DEVICE void keep_values(Values& values) const {
    CUTE_UNROLL
    for (int step = 0; step < T::kDimSteps; ++step) read_keys(Layout::kV, step, values(cute::_, cute::_, step));
  }
  /// Dimensions 16 * step of queries 16 * row_step of a tile.
  template <class Fragment>
  CUTE_DEVICE void read_queries(uint32_t tile, int row_step, int step, Fragment&& fragment) const {
    load_piece<QTile>(smem, tile, columns_first, row_step, step, fragment);
  }

  /// scores += (K or V) (Q or dO)^T, of the queries from 16 * row_step on of a tile.
  template <class Types, class ReadKeys>
  CUTE_DEVICE void add_scores(ReadKeys const& read, uint32_t tile, int row_step, typename Types::Scores& scores) const {
    add_product<Types, T::kDimSteps, Types::kKeySteps>(
        read, [&](int i, int n, auto&& q) FMHA_INLINE { read_queries(tile, row_step + n, i, q); }, scores);
  }

  /// gradient += P^T dO, or dS^T Q. `factors`: of the gradient's keys, and of a tile's queries from 16 * row_step on.
  template <class Factors>
  CUTE_DEVICE void add_queries(Factors const& factors, uint32_t tile, int row_step, Gradient& gradient) const {
    add_queries(factors, gradient,
                [&](int step, int n, auto&& b) FMHA_INLINE { read_columns(tile, row_step + step, n, b); });
  }
  /// The same of what read(step, n, fragment) brings, as read_columns() does.
  template <class Factors, class Read>
  CUTE_DEVICE void add_queries(Factors const& factors, Gradient& gradient, Read const& read) const {
    using namespace cute;
    using G = KeyGradientTypes<C>;
    CUTE_UNROLL
    for (int step = 0; step < size<2>(factors); ++step) {
      CUTE_UNROLL
      for (int n = 0; n < G::kColumns / 16; ++n) {
        OperandsB<T, 1> b;
        read(step, n, b(_, _, 0));
        multiply<G>(factors(_, _, step), b(_, _, 0), gradient, n);
      }
      repeat_mma_passes<typename T::Mma>(gradient);
    }
  }
  /// Columns 16 * n of those that this warp's gradient has, of queries 16 * row_step of a tile.
  template <class Fragment>
  CUTE_DEVICE void read_columns(uint32_t tile, int row_step, int n, Fragment&& fragment) const {
    using G = KeyGradientTypes<C>;
    if constexpr (C.key_sharers() > 1) {
      tile += G::column_begin(warp) / QTile::P::kWidth * (QTile::kRows * QTile::P::kRowBytes);
    }
    load_piece<QTile, true>(smem, tile, rows_first, row_step, n, fragment);
  }

  // ---- scores

  /// Where a unit's terms have those of queries from `query` on: LSE, and -D.
  CUTE_DEVICE static uint32_t lse_of(uint32_t terms, int query) { return terms + query * 4; }
  CUTE_DEVICE static uint32_t minus_d_of(uint32_t terms, int query) { return terms + (C.unit() + query) * 4; }
  /// Of a lane's pair of queries.
  CUTE_DEVICE float2 terms_at(uint32_t terms, int pair) const {
    return *reinterpret_cast<float2 const*>(smem + terms + pair * 32 + lane_id() % 4 * 8);
  }

  /// Whether some query of a tile doesn't see all keys.
  CUTE_DEVICE bool is_masked(QueryCursor const& at) const {
    KeyTile const& tile = place();
    return at.tile * C.tile_m < tile.all_begin || (at.tile + 1) * C.tile_m > tile.all_end;
  }

  /// P^T of a chunk, in pairs. `query_begin`: of the chunk.
  template <class Types>
  CUTE_DEVICE void exponentiate(bool masked, typename Types::Scores const& scores,
                                typename Types::Probabilities& probabilities, uint32_t lse, int query_begin) const {
    if constexpr (kHidesBehind) {
      exponentiate<Types>(scores, probabilities, lse);
      if (masked) hide<Types>(probabilities, query_begin);
    } else if (masked) {
      asm volatile("" ::: "memory");  // or both ways have their exponentials before the branch
      exponentiate<Types>(scores, probabilities, lse);
      hide<Types>(probabilities, query_begin);
    } else {
      exponentiate<Types>(scores, probabilities, lse);
    }
  }

  /// The same, of whatever is hidden as well.
  template <class Types>
  CUTE_DEVICE void exponentiate(typename Types::Scores const& scores, typename Types::Probabilities& probabilities,
                                uint32_t lse) const {
    auto rows = by_row(scores);
    auto pairs = pairs_by_row<Types>(probabilities);
    float const scale_log2 = params.scale * kLog2e;
    CUTE_UNROLL
    for (int pair = 0; pair < Types::kQueries / 8; ++pair) {
      float2 const of_pair = terms_at(lse, pair);
      CUTE_UNROLL
      for (int row = 0; row < 2 * T::kRowSteps; ++row) {
        float const p0 = exp2_approx(fmaf(rows(row, 2 * pair), scale_log2, -of_pair.x));
        float const p1 = exp2_approx(fmaf(rows(row, 2 * pair + 1), scale_log2, -of_pair.y));
        pairs(row, pair) = pack<typename T::Element>(p0, p1);
      }
    }
  }

  /// Hidden probabilities become 0, whatever they are. `query_begin`: of the chunk.
  template <class Types>
  CUTE_DEVICE void hide(typename Types::Probabilities& probabilities, int query_begin) const {
    auto pairs = pairs_by_row<Types>(probabilities);
    int const first = query_begin + lane_id() % 4 * 2;
    CUTE_UNROLL
    for (int row = 0; row < 2 * T::kRowSteps; ++row) {
      int const key = place().key_begin + warp * C.keys_per_warp() + accumulator_row(row, lane_id());
      VisibleQueries seen = visible_queries(params, place().sequence, key);
      seen.begin -= first, seen.end -= first;
      CUTE_UNROLL
      for (int pair = 0; pair < Types::kQueries / 8; ++pair) {
        if (!seen.sees(8 * pair)) pairs(row, pair) &= 0xffff0000u;
        if (!seen.sees(8 * pair + 1)) pairs(row, pair) &= 0x0000ffffu;
      }
    }
  }

  template <class Types>
  CUTE_DEVICE ScoredChunk<C, Types> scored_chunk(QueryCursor const& at, int query_begin) const {
    int const group = params.num_heads / params.num_heads_kv;
    return {params, place().sequence, place().head_kv * group + at.head,
            place().key_begin + warp * C.keys_per_warp() + lane_id() / 4, query_begin + lane_id() % 4 * 2};
  }
  /// Of a scored row: P, and what dS is made of.
  template <class Types>
  CUTE_DEVICE void score(bool masked, typename Types::Scores const& scores,
                         typename Types::Probabilities& probabilities, typename Types::Probabilities& factors,
                         uint32_t lse, QueryCursor const& at, int query_begin) const {
    ScoredChunk<C, Types> const chunk = scored_chunk<Types>(at, query_begin);
    ScoreKind const kind = score_kind(params);
    VisibleQueries seen[2 * T::kRowSteps];
    if (masked || kind == ScoreKind::any) {
      CUTE_UNROLL
      for (int row = 0; row < 2 * T::kRowSteps; ++row) {
        seen[row] = visible_queries(params, place().sequence, chunk.key + 8 * row);
        seen[row].begin -= chunk.query, seen[row].end -= chunk.query;
      }
    }
    auto const exponentiate = [&]<bool Masked, ScoreKind Kind>() FMHA_INLINE {
      chunk.template exponentiate<Masked, Kind>(scores, probabilities, factors, seen,
                                                [&](int pair) { return terms_at(lse, pair); });
    };
    auto const of_kind = [&]<ScoreKind Kind>() FMHA_INLINE {
      masked ? exponentiate.template operator()<true, Kind>() : exponentiate.template operator()<false, Kind>();
    };
    switch (kind) {
      case ScoreKind::plain:
        of_kind.template operator()<ScoreKind::plain>();
        break;
      case ScoreKind::capped:
        of_kind.template operator()<ScoreKind::capped>();
        break;
      case ScoreKind::alibi:
        of_kind.template operator()<ScoreKind::alibi>();
        break;
      case ScoreKind::any:
        exponentiate.template operator()<true, ScoreKind::any>();
    }
    if (params.listed != nullptr) {
      chunk.hide_pieces(place().listed[at.number].pieces >> (warp * C.keys_per_warp() / kListedKeys),
                        (query_begin - at.tile * C.tile_m) / kListedQueries, probabilities, factors);
    }
    chunk.drop_out(probabilities, factors);
  }

  /// Where dP begins: -D.
  template <class Types>
  CUTE_DEVICE void start_with_d(typename Types::Scores& scores, uint32_t minus_d) const {
    CUTE_UNROLL
    for (int pair = 0; pair < Types::kQueries / 8; ++pair) start_pair(scores, pair, terms_at(minus_d, pair));
  }

  /// P -> dS = P (dP - D).
  template <class Types>
  CUTE_DEVICE static void differentiate(typename Types::Probabilities& probabilities,
                                        typename Types::Scores const& scores) {
    auto rows = by_row(scores);
    auto pairs = pairs_by_row<Types>(probabilities);
    CUTE_UNROLL
    for (int pair = 0; pair < Types::kQueries / 8; ++pair) {
      CUTE_UNROLL
      for (int row = 0; row < 2 * T::kRowSteps; ++row) {
        if constexpr (kMultipliesPairs) {
          pairs(row, pair) =
              multiply_pairs(pairs(row, pair), pack<typename T::Element>(rows(row, 2 * pair), rows(row, 2 * pair + 1)));
        } else {
          float2 const p = unpack<typename T::Element>(pairs(row, pair));
          pairs(row, pair) = pack<typename T::Element>(p.x * rows(row, 2 * pair), p.y * rows(row, 2 * pair + 1));
        }
      }
    }
  }
  CUTE_DEVICE static uint32_t multiply_pairs(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }

  /// dS^T to [key, query], queries 16 * column_step and on.
  template <class Types>
  CUTE_DEVICE void store_scores(int column_step, typename Types::Probabilities& factors,
                                uint32_t tile = Layout::kScores) const {
    if constexpr (kStoresMatrices) {
      CUTE_UNROLL
      for (int step = 0; step < Types::kKeySteps; ++step) {
        CUTE_UNROLL
        for (int m = 0; m < T::kRowSteps; ++m) {
          auto const words = cute::recast<uint32_t>(factors(cute::_, m, step));
          auto* const to = reinterpret_cast<cute::uint128_t*>(smem + scores_offset(warp, m, column_step + step, tile));
          cute::SM90_U32x4_STSM_N::copy(words(0), words(1), words(2), words(3), *to);
        }
      }
      return;
    }
    auto pairs = pairs_by_row<Types>(factors);
    CUTE_UNROLL
    for (int row = 0; row < 2 * T::kRowSteps; ++row) {
      CUTE_UNROLL
      for (int pair = 0; pair < Types::kQueries / 8; ++pair) {
        // A step of 8 columns flips a bit of the chunk number, one of 8 rows leaves the swizzle as it is.
        uint32_t const piece = ScoresTile::piece(scores_lane ^ (pair % 2 * 16), row / 2, column_step + pair / 2);
        uint32_t const rows_before = (warp * C.keys_per_warp() + row % 2 * 8) * ScoresTile::P::kRowBytes;
        *reinterpret_cast<uint32_t*>(smem + tile + rows_before + piece) = pairs(row, pair);
      }
    }
  }
  /// Where a lane has its 16 bytes, those that ldmatrix.x4 and stmatrix.x4 ask of it, of 16 of a warp's keys and 16
  /// queries of dS.
  CUTE_DEVICE uint32_t scores_offset(int warp, int m, int column_step, uint32_t tile) const {
    return scores_of(warp, tile) + ScoresTile::piece(scores_rows_first(), m, column_step);
  }
  /// These as an A operand.
  template <class Fragment>
  CUTE_DEVICE void read_scores(int warp, int m, int column_step, uint32_t tile, Fragment&& fragment) const {
    load_piece<ScoresTile>(smem, scores_of(warp, tile), scores_rows_first(), m, column_step, fragment);
  }
  CUTE_DEVICE static uint32_t scores_of(int warp, uint32_t tile) {
    return tile + warp * C.keys_per_warp() * ScoresTile::P::kRowBytes;
  }
  CUTE_DEVICE uint32_t scores_rows_first() const {
    constexpr bool kKnown = kStoresMatrices && ScoresTile::P::kRowBytes == QTile::P::kRowBytes;
    return kKnown ? rows_first : ScoresTile::lane_offset(MatrixLane::rows_first(lane_id()));
  }

  /// The same to memory, of the steps of the walk. `eights`: queries before, by 8.
  template <class Types>
  CUTE_DEVICE void write_scores(int step, int eights, typename Types::Probabilities& factors) const {
    auto pairs = pairs_by_row<Types>(factors);
    // The thread's number is read anew: registers that would be kept for it are spilled.
    int const thread = thread_id() % (32 * C.group_warps());
    auto* const tile = reinterpret_cast<uint32_t*>(place().sums) + int64_t(step) * (C.tile_m * C.tile_n / 2) +
                       scores_matrix(C.tile_m, thread / 32 * (C.keys_per_warp() / 8), eights) / 2 + thread % 32;
    CUTE_UNROLL
    for (int row = 0; row < 2 * T::kRowSteps; ++row) {
      CUTE_UNROLL
      for (int pair = 0; pair < Types::kQueries / 8; ++pair) {
        tile[scores_matrix(C.tile_m, row, pair) / 2] = pairs(row, pair);
      }
    }
  }

  // ---- dQ

  /// The walk of a tile of keys.
  CUTE_DEVICE QueryWalk walk_of(int tile) const {
    Sequence const& s = place().sequence;
    int const first = tile * C.tile_n, last = smaller(first + C.tile_n, s.keys) - 1;
    return query_walk(visible_queries(params, s, first), visible_queries(params, s, last), C.tile_m);
  }
  /// Waits until the tiles of keys before this one have added theirs to dQ of a query tile: their blocks began earlier.
  CUTE_DEVICE void await_turn(int const* turn, QueryCursor const& at) const {
    auto const& mine = place();
    auto const await = [&](int before) {
      int done;
      do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(turn) : "memory");
      } while (done != before + 1);
    };
    if (params.listed != nullptr) {
      await(mine.listed[at.number].before);
      __syncwarp();
      return;
    }
    for (int before = mine.key_begin / C.tile_n - 1; before >= mine.least_before; --before) {
      QueryWalk const walk = walk_of(before);
      if (at.tile < walk.first || at.tile >= walk.first + walk.tiles) continue;
      await(before);
      break;
    }
    __syncwarp();
  }
  CUTE_DEVICE void pass_turn(int* turn) const {
    __threadfence();
    __syncwarp();
    if (lane_id() == 0) {
      int const done = place().key_begin / C.tile_n + 1;
      asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(done) : "memory");
    }
  }

  /// Adds dQ of dq_rows() from query `row` of a tile on. read() is called when nothing is read of dS any more, which is
  /// in `tile`.
  template <class Read>
  CUTE_DEVICE void add_query_gradient(QueryCursor const& at, int row, Read const& read,
                                      uint32_t tile = Layout::kScores) const {
    using namespace cute;
    typename Q::Gradient dq;
    clear(dq);
    int const row_begin = Q::row_begin(warp), column_begin = Q::column_begin(warp);
    add_product<Q, C.tile_n / 16, Q::kColumns / 16>(
        [&](int step, auto&& ds) FMHA_INLINE {
          CUTE_UNROLL
          for (int m = 0; m < Q::kRowSteps; ++m) {
            load_piece<ScoresTile, true>(smem, tile, scores_columns_first, step, (row + row_begin) / 16 + m, ds(_, m));
          }
        },
        [&](int step, int n, auto&& k)
            FMHA_INLINE { load_piece<KTile, true>(smem, 0, rows_first, step, column_begin / 16 + n, k); },
        dq);
    read();
    float* const to = place().sums + tile_number(at) * (C.tile_m * C.head_dim) +
                      sum_offset(C.head_dim, row + row_begin, column_begin);
    int* turn = nullptr;
    if constexpr (C.scored()) {
      if (params.turns != nullptr) {
        turn = place().turns + tile_number(at) * kTurns + row / C.unit() * C.group_warps() + warp;
        await_turn(turn, at);
      }
    }
    CUTE_UNROLL
    for (int m = 0; m < Q::kRowSteps; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < Q::kColumns / 8; ++n) {
        auto const piece = dq(_, m, n);
        add_to_sums(to + sum_offset(C.head_dim, 16 * m, 8 * n), lane_id(), piece(0), piece(1), piece(2), piece(3));
      }
    }
    if constexpr (C.scored()) {
      if (turn != nullptr) pass_turn(turn);
    }
  }
};

}  // namespace cutlass_fmha
