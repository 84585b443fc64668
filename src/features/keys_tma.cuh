// Keys by TMA, for ranged and score-mod rows: a lane of the first warp asks for V, one of the last warp for K.
#pragma once

#include "../core/tma.cuh"
#include "walk.cuh"

namespace cutlass_fmha {

/// Who asks. What it must know stays in uniform registers through the main loop: a tile is asked for in few
/// instructions, which the others wait for.
template <ForwardConfig C>
struct TmaFeatureProducer {
  using Shared = FeatureTileLayout<C>;
  using Pipe = KvPipeline<C>;
  using KTile = TmaTile<C.head_dim, C.tile_n, C.element_bytes()>;
  using VTile = TmaTile<C.head_dim_v(), C.tile_n, C.element_bytes()>;

  FeatureTmaParams const& p;
  char* const smem;
  int const warp, blocks;
  int const row;  ///< of the tensor, where phase 0 has its first key
  int const head, entry, put_off;

  CUTE_DEVICE TmaFeatureProducer(FeatureTmaParams const& p, char* smem, int warp, int blocks, int first_row, int head,
                                 int entry, int put_off)
      : p(p),
        smem(smem),
        warp(warp),
        blocks(blocks),
        row(uniform(first_row)),
        head(uniform(head)),
        entry(uniform(entry)),
        put_off(put_off) {}

  /// Starts the first loads of K and V where keys are in order: by the thread that made the barriers, which waits for
  /// nobody. `there`: keys of the first tile that exist; all other tiles' do.
  CUTE_DEVICE void start_in_order(Pipe const& k_pipe, Pipe const& v_pipe, int there) const {
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      if (tile >= blocks) break;
      request<KTile>(k_pipe, p.k_map, Shared::kKOffset, Shared::kKTile, Shared::kBarriers, tile, false);
      request<VTile>(v_pipe, p.v_map, Shared::kVOffset, Shared::kVTile, Shared::kBarriers + Pipe::kBytes, tile,
                     tile == 0 && there < C.tile_n);
    }
  }
  /// The same of pages, by the warps that ask for them.
  CUTE_DEVICE void start(Pipe const& k_pipe, Pipe const& v_pipe, int there) const {
    CUTE_UNROLL
    for (int tile = 0; tile < C.stages; ++tile) {
      refill_k<true>(k_pipe, tile);
      refill_v<true>(v_pipe, tile, tile == 0 && there < C.tile_n);
    }
  }
  /// By the warp that asks for V: rows of keys that don't exist become zeros, whatever stands there, before the others
  /// may read the tile.
  CUTE_DEVICE void finish_first(Pipe const& v_pipe, int there) const {
    if (warp != 0 || there >= C.tile_n) return;
    mbarrier_wait(cute::cast_smem_ptr_to_uint(Shared::partial_barrier(smem)), 0);
    using P = typename VTile::P;
    constexpr int kChunks = C.tile_n * P::kChunks;  // of a panel
    auto* const chunks = reinterpret_cast<uint4*>(smem + Shared::kVOffset);
    CUTE_NO_UNROLL
    for (int chunk = there * P::kChunks + lane_id(); chunk < kChunks; chunk += 32) {
      CUTE_UNROLL
      for (int panel = 0; panel < P::kCount; ++panel) chunks[panel * kChunks + chunk] = make_uint4(0, 0, 0, 0);
    }
    cute::tma_store_fence();  // what the copy unit brings here next comes after these
    // Each lane for what it wrote: racecheck can't follow a __syncwarp.
    if (lane_id() == 0) {
      v_pipe.producer_commit(0);
    } else {
      v_pipe.producer_commit_once(0);
    }
  }
  template <bool First = false>
  CUTE_DEVICE void refill_k(Pipe const& pipe, int tile) const {
    if (warp == C.warps - 1) {
      refill<KTile, First>(pipe, p.k_map, Shared::kKOffset, Shared::kKTile, Shared::kBarriers, false, tile, false);
    }
  }
  template <bool First = false>
  CUTE_DEVICE void refill_v(Pipe const& pipe, int tile, bool partial = false) const {
    if (warp == 0) {
      refill<VTile, First>(pipe, p.v_map, Shared::kVOffset, Shared::kVTile, Shared::kBarriers + Pipe::kBytes, true,
                           tile, partial);
    }
  }

 private:
  CUTE_DEVICE int tiles_back(int tile) const { return C.modifies_scores() ? TilesBack{blocks, put_off}(tile) : tile; }
  CUTE_DEVICE uint64_t* full_barrier(int barriers, int tile) const {
    return reinterpret_cast<uint64_t*>(smem + barriers + Pipe::full_offset(tile));
  }
  /// Of keys in order; by one thread.
  template <class Tile>
  CUTE_DEVICE void request(Pipe const& pipe, TensorMap const& map, int ring, int tile_bytes, int barriers, int tile,
                           bool partial) const {
    Tile::load(map, partial ? Shared::partial_barrier(smem) : full_barrier(barriers, tile),
               smem + ring + pipe.stage(tile) * tile_bytes, Tile::kPanelBytes, row - tiles_back(tile) * C.tile_n, head,
               entry);
  }
  /// By a warp.
  template <class Tile, bool First>
  CUTE_DEVICE void refill(Pipe const& pipe, TensorMap const& map, int ring, int tile_bytes, int barriers, bool values,
                          int tile, bool partial) const {
    if (tile >= blocks) return;
    pipe.producer_acquire(tile);
    if (!First && p.keys_stand == KeysStand::in_order) {
      if (cute::elect_one_sync()) request<Tile>(pipe, map, ring, tile_bytes, barriers, tile, false);
      return;
    }
    auto* const barrier = First && partial ? Shared::partial_barrier(smem) : full_barrier(barriers, tile);
    char* const to = smem + ring + pipe.stage(tile) * tile_bytes;
    if (!First) {
      cute::cp_async_wait<0>();  // by now this tile's pages are known
      __syncwarp();
    }
    if (cute::elect_one_sync()) request_pages<Tile, First>(map, barrier, to, values, tile);
    __syncwarp();
    int const next = tile + C.stages;
    if (next < blocks) ask_for_page<C>(p, smem, values, next, row - next * C.tile_n, lane_id());
  }

  /// By one thread. A tile that lies in one page comes at once, another one in runs of rows that follow each other.
  template <class Tile, bool First>
  CUTE_DEVICE void request_pages(TensorMap const& map, uint64_t* barrier, char* to, bool values, int tile) const {
    auto const& at = Shared::place(smem);
    cute::set_barrier_transaction_bytes(*barrier, Tile::kBytes);
    bool const by_runs = p.keys_stand == KeysStand::page_runs;
    CUTE_NO_UNROLL
    for (int run = 0; run < (by_runs ? Shared::kRuns : 1); ++run) {
      int const key = row - tile * C.tile_n + run * kPageRun;
      // Runs that don't exist, or that a window left behind, are read as zeros, from beyond a page: the table need not
      // name one.
      bool const exists = (!First || key < at.sequence.keys) && !at.behind.has(key, by_runs ? kPageRun : C.tile_n);
      int const page = !exists ? 0 : First ? page_number(p, at.sequence, key) : Shared::pages(smem, values, tile)[run];
      Tile::load_rows(map, barrier, to, run * kPageRun, exists ? row_in_page(p, key) : p.page_size, at.head_kv, page);
    }
  }
};

template <ForwardConfig C>
struct TmaFeatureKeys : FeatureWalk<C> {
  using Base = FeatureWalk<C>;
  using Shared = typename Base::Shared;
  using Base::Base, Base::p, Base::smem, Base::warp, Base::blocks, Base::last_begin, Base::put_off, Base::k_pipe,
      Base::v_pipe;
  static constexpr bool kAsksInTurn = true;
  /// A long softmax ends after the other group's turn has come to K.
  static constexpr bool kBringsInSoftmax = C.ping_pong && C.stages == 1 && C.modifies_scores();
  static constexpr int kPassAt = ForwardTypes<C>::kKeySteps - (C.head_dim < 96 ? 1 : 2);

  using Producer = TmaFeatureProducer<C>;
  Producer const* producer = nullptr;

  CUTE_DEVICE Producer make_producer(Sequence const& sequence, FeatureTile const& tile) const {
    return {static_cast<FeatureTmaParams const&>(p),
            smem,
            warp,
            blocks,
            sequence.first_k + last_begin,
            p.by_group.quotient(tile.head),
            sequence.entry_k,
            put_off};
  }
  CUTE_DEVICE void set_producer(Producer const& by) { producer = &by; }
  /// By one thread, which asks for the first tiles at once where it can.
  CUTE_DEVICE void init_pipelines(Producer const& by, Sequence const& sequence) const {
    auto const& maps = static_cast<FeatureTmaParams const&>(p);
    int const there = sequence.keys - last_begin;
    fetch_maps(maps.k_map, maps.v_map);
    k_pipe.init(1, C.threads());
    v_pipe.init(1, C.threads(), there < C.tile_n ? 32 : 1);
    mbarrier_init(cute::cast_smem_ptr_to_uint(Shared::partial_barrier(smem)), 1);
    cutlass::arch::fence_barrier_init();
    if (starts_alone()) by.start_in_order(k_pipe, v_pipe, there);
  }
  /// Whether init_pipelines() did. Otherwise pages are looked up by all lanes of the warps that ask for them.
  CUTE_DEVICE bool starts_alone() const { return p.keys_stand == KeysStand::in_order; }
  CUTE_DEVICE void start() const { producer->start(k_pipe, v_pipe, keys_of_first()); }
  /// What start() left: not before what all wait for.
  CUTE_DEVICE void finish_first() const { producer->finish_first(v_pipe, keys_of_first()); }
  CUTE_DEVICE void refill_k(int tile) const { producer->refill_k(k_pipe, tile); }
  CUTE_DEVICE void refill_v(int tile) const { producer->refill_v(v_pipe, tile); }

 private:
  CUTE_DEVICE int keys_of_first() const { return this->place().sequence.keys - last_begin; }
};

}  // namespace cutlass_fmha
