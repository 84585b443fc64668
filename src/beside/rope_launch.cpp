#include "rope_launch.h"

#include "../helpers/vectors.h"

namespace cutlass_fmha {
namespace {

constexpr int kMaxLanes = 1 << kMaxLanesLog2;
constexpr int64_t kThreads = 1 << 18;  // what keeps a large GPU busy: with fewer, each row has threads of its own
constexpr int kMaxHeads = 4, kMaxHeadsBackward = 8;  // of a thread: each needs the angles that it has

/// Whether all rows are made of whole runs of `width` elements, aligned as such, and all pairs are in two.
bool vectors(RopeParams const& p, int bytes, int width) {
  auto const aligned = [&](void const* pointer, int64_t strides, int bytes) {
    return (int64_t(reinterpret_cast<uintptr_t>(pointer)) | strides * bytes) % std::min(kVectorBytes, width * bytes) ==
           0;
  };
  for (RopeRows const* rows : {&p.q, &p.k, &p.v}) {
    auto const strides = [](Strides const& s) { return s.batch | s.seqlen | s.head; };
    if (rows->there() && !(aligned(rows->x, strides(rows->x_stride) | rows->head_dim, bytes) &&
                           aligned(rows->out, strides(rows->out_stride), bytes) &&
                           aligned(rows->gradient, strides(rows->gradient_stride), bytes) &&
                           aligned(rows->weight, 0, rows->weight_float32 ? 4 : bytes))) {
      return false;
    }
  }
  int const table_bytes = p.rotary.float32 ? 4 : bytes;
  return p.rotary.dim % (2 * width) == 0 && aligned(p.rotary.cos, p.rotary.cos_stride, table_bytes) &&
         aligned(p.rotary.sin, p.rotary.sin_stride, table_bytes) && aligned(p.inv_freq, 0, 4);
}

/// Items of a row; in place the elements that stay as they are have none.
int items_of(RopeParams const& p, RopeRows const& rows, bool is_value, int width) {
  bool const turned_alone = rows.x == rows.out && !p.norm;
  return ceil_div(turned_alone && !is_value ? p.rotary.dim : rows.head_dim, 2 * width);
}

/// Sets what both launches set of q, k and v.
void prepare(RopeParams& p, int bytes) {
  int const rows_of_entry = p.page_table ? p.page_size : p.capacity;
  for (RopeRows* rows : {&p.q, &p.k, &p.v}) {
    bool const cached = p.cache_seqlens && rows != &p.q;
    rows->x_stride = used(rows->x_stride, p.batch, p.seqlen, rows->num_heads);
    rows->gradient_stride = used(rows->gradient_stride, p.batch, p.seqlen, rows->num_heads);
    rows->out_stride = cached ? used(rows->out_stride, p.entries, rows_of_entry, rows->num_heads)
                              : used(rows->out_stride, p.batch, p.seqlen, rows->num_heads);
  }
  p.width = 1;
  for (int width : {RopeParams::kNarrow, kVectorBytes / bytes}) {
    bool fits = vectors(p, bytes, width);
    for (RopeRows const* rows : {&p.q, &p.k, &p.v}) {
      fits = fits && !(rows->there() && items_of(p, *rows, rows == &p.v, width) > kMaxLanes);
    }
    if (fits) p.width = width;
  }
  p.per_element = 1.f / float(std::max(1, p.head_dim));
  p.by_seqlen = Divisor(std::max(1, p.seqlen));
  p.by_page_size = Divisor(p.page_table ? p.page_size : 1);
  if (!p.cu_seqlens) p.sequences = p.batch;
}

/// Sets how threads divide rows. `heads`: that a thread goes through at most.
void divide(RopeParams const& p, RopeRows& rows, bool is_value, int heads) {
  rows.items = items_of(p, rows, is_value, p.width);
  rows.lanes_log2 = std::min(kMaxLanesLog2, int(std::bit_width(unsigned(std::max(1, rows.items) - 1))));
  rows.slots = ceil_div(rows.num_heads, heads);
  rows.steps = ceil_div(rows.num_heads, rows.slots);
  rows.by_slots = Divisor(rows.slots);
  grid_of(int64_t(p.batch) * p.seqlen * rows.num_heads, 0);  // throws where there are too many
  rows.units = p.batch * p.seqlen * rows.slots;
}

/// Sets how blocks of queries and of keys take turns.
void mix(RopeParams& p) {
  uint64_t const keys = uint64_t(p.k.blocks), all = keys + uint64_t(p.q.blocks);
  p.keys_share = keys == 0 || keys == all ? 0 : uint32_t(((keys << 32) + all - 1) / all);
}

}  // namespace

void launch(Row const& row, RopeParams const& params, int device, cudaStream_t stream) {
  RopeParams p = params;
  prepare(p, bytes_of(row.dtype()));
  dim3 grid(0);
  for (RopeRows* rows : {&p.q, &p.k, &p.v}) {
    rows->blocks = 0;
    if (!rows->there()) continue;
    for (int heads = p.width > 1 ? kMaxHeads : 1;; heads /= 2) {
      divide(p, *rows, rows == &p.v, heads);
      if (heads > 1 && (int64_t(rows->units) << rows->lanes_log2) < kThreads) continue;
      rows->blocks = int(grid_of(rows->units, rows->lanes_log2).x);
      break;
    }
    if (rows->items == 0) rows->blocks = 0;
    grid.x += unsigned(rows->blocks);
  }
  mix(p);
  if (p.seqused_k) grid.x = std::max(grid.x, grid_of(p.sequences, 0).x);
  set_places(p, grid.x, row.threads(), device);
  if (grid.x > 0) launch_kernel(row, grid, &p, device, stream);
}

void launch(Row const& row, RopeBackwardParams const& params, int device, cudaStream_t stream) {
  RopeBackwardParams p = params;
  constexpr int kWarps = kHelperThreads / kMaxLanes;
  prepare(p, bytes_of(row.dtype()));
  dim3 grid(0);
  for (RopeRows* rows : {&p.q, &p.k}) {
    rows->parts = p.parts_of(*rows);
    rows->blocks = 0;
    if (!rows->there()) continue;
    rows->blocks = p.width > 1 ? rows->parts : ceil_div(rows->parts, kWarps);
    for (int heads = p.width > 1 ? kMaxHeadsBackward : 1;; heads /= 2) {
      divide(p, *rows, false, heads);
      int64_t const at_once = int64_t(rows->blocks) * (kHelperThreads >> rows->lanes_log2);
      if (heads > 1 && rows->units < 4 * at_once) continue;
      if (p.width > 1) {  // as few blocks as need no more turns
        int64_t const turns = (rows->units + at_once - 1) / at_once, groups = kHelperThreads >> rows->lanes_log2;
        rows->blocks = rows->parts = int(((rows->units + turns - 1) / turns + groups - 1) / groups);
      }
      break;
    }
    grid.x += unsigned(rows->blocks);
  }
  mix(p);
  set_places(p, grid.x, row.threads(), device);
  launch_kernel(row, grid, &p, device, stream);
  if (!p.q.partial && !p.k.partial) return;
  dim3 const columns(unsigned(ceil_div(p.head_dim, RopeBackwardParams::kColumns)), 2);
  launch_kernel(helper(Family::rope_weights, row.dtype(), row.arch()), columns, &p, device, stream);
}

}  // namespace cutlass_fmha
