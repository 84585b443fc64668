// TMA: boxes of tensors between global and shared memory, copied at a moment of the simulator's choice.
#include <algorithm>
#include <cstring>

#include "block.h"
#include "opcodes.h"

namespace simulator {

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      cuuint64_t const* extents, cuuint64_t const* strides, cuuint32_t const* box,
                      cuuint32_t const* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap result{};
  result.mark = kTensorMapMark;
  result.address = reinterpret_cast<uint64_t>(address);
  result.rank = static_cast<uint16_t>(rank);
  // Of other types there are none.
  bool const is_half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  result.element_bytes = is_half ? 2 : 0;
  // CU_TENSOR_MAP_SWIZZLE_32B and those that follow; what comes behind 128B is not simulated.
  int const span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle;
  if (rank < 1 || rank > 5 || result.element_bytes == 0 || span > 128 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (reinterpret_cast<uint64_t>(map) % 64 != 0 || address == nullptr || result.address % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  result.swizzle = static_cast<uint16_t>(span);
  for (cuuint32_t i = 0; i < rank; ++i) {
    result.extents[i] = extents[i];
    result.strides[i] = i == 0 ? result.element_bytes : strides[i - 1];
    result.box[i] = static_cast<uint16_t>(box[i]);
    if (extents[i] == 0 || extents[i] > uint64_t(1) << 32) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (result.strides[i] % 16 != 0 || result.strides[i] >= uint64_t(1) << 40))
      return CUDA_ERROR_INVALID_VALUE;
    if (box[i] == 0 || box[i] > 256 || element_strides[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  }
  int const row = result.box[0] * result.element_bytes;
  if (row % 16 != 0 || (span > 0 && row > span)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &result, sizeof(result));
  return CUDA_SUCCESS;
}

namespace {

/// Where the copy unit puts what would be at a shared address: in each span of a row the 16-byte pieces change places,
/// as the address bits from 128 bytes on say.
uint32_t swizzled(uint32_t address, uint32_t span) {
  return span == 0 ? address : address ^ (address >> 3 & (span - 1) & ~uint32_t(15));
}

uint32_t box_bytes(TensorMap const& map) {
  uint32_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

constexpr uint32_t kPiece = 16;  // bytes that stay together

/// Calls f(shared offset, address, bytes) for each piece of a box in shared memory, with the bytes at its beginning
/// that are inside of the tensor.
template <class F>
void for_pieces(BulkCopy const& copy, F const& f) {
  TensorMap const& map = copy.map;
  uint32_t const row_bytes = map.box[0] * map.element_bytes, pieces = row_bytes / kPiece;
  uint32_t const rows = box_bytes(map) / row_bytes;
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t address = map.address;
    bool inside = true;
    uint32_t rest = row;
    for (int d = 1; d < map.rank; ++d) {
      int64_t const index = int64_t(copy.origin[static_cast<size_t>(d)]) + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && index >= 0 && static_cast<uint64_t>(index) < map.extents[d];
      address += static_cast<uint64_t>(index) * map.strides[d];
    }
    // The copy unit cuts a row off at both ends; the beginning of these tensors' rows is never before theirs.
    for (uint32_t piece = 0; piece < pieces; ++piece) {
      int64_t const begin = int64_t(copy.origin[0]) * map.element_bytes + piece * kPiece;
      int64_t const left = static_cast<int64_t>(map.extents[0]) * map.element_bytes - begin;
      auto const bytes = static_cast<uint32_t>(inside ? std::clamp<int64_t>(left, 0, kPiece) : 0);
      f(row * row_bytes + piece * kPiece, address + static_cast<uint64_t>(begin), bytes);
    }
  }
}

}  // namespace

void Block::ask_for(Warp const& warp, BulkCopy const& copy) {
  uint32_t const bytes = box_bytes(copy.map);
  if (copy.shared % 128 != 0) warp.fail("a box at shared address " + std::to_string(copy.shared) + ": not aligned");
  if (copy.origin[0] < 0) warp.fail("boxes that begin before a row are not simulated");
  shared(warp, copy.shared, kPiece);
  shared(warp, copy.shared + bytes - kPiece, kPiece);
  if (copy.load) poison(copy.shared, bytes);
  bulk_copies_.push_back(copy);
  bulk_copies_.back().group = bulk_groups_[static_cast<size_t>(warp.number)][copy.lane];
  bulk_copies_.back().warp = warp.number;
}

void Block::make(BulkCopy const& copy) {
  Warp const& warp = warps_[static_cast<size_t>(copy.warp)];
  for_pieces(copy, [&](uint32_t offset, uint64_t address, uint32_t bytes) {
    std::byte* const here = shared_.get() + swizzled(copy.shared + offset, copy.map.swizzle);
    if (copy.load) {
      std::memset(here, 0, kPiece);
      std::memcpy(here, reinterpret_cast<void const*>(address), bytes);
    } else {
      std::memcpy(reinterpret_cast<void*>(address), here, bytes);
    }
  });
  if (copy.load) arrive_at_mbarrier(warp, copy.mbarrier, 0, -int64_t(box_bytes(copy.map)));
}

void Block::commit_bulk_group(Warp const& warp) {
  for_lanes(warp.active, [&](int lane) { ++bulk_groups_[static_cast<size_t>(warp.number)][lane]; });
}

void Block::wait_for_bulk_groups(Warp const& warp, uint32_t groups) {
  Lanes<uint32_t> const& committed = bulk_groups_[static_cast<size_t>(warp.number)];
  auto const over = [&](BulkCopy const& copy) {
    return !copy.load && copy.warp == warp.number && (warp.active >> copy.lane & 1) &&
           uint64_t(copy.group) + groups < committed[copy.lane];
  };
  for (BulkCopy const& copy : bulk_copies_) {
    if (over(copy)) make(copy);
  }
  std::erase_if(bulk_copies_, over);
}

namespace {

/// The tensor that is described at an address.
TensorMap map_at(Warp& w, Address const& address, int lane) {
  TensorMap map;
  std::memcpy(&map, reinterpret_cast<void const*>(address_of(w, address, lane)), sizeof(map));
  if (map.mark != kTensorMapMark) w.fail("no tensor is described at the address of a tensor map");
  return map;
}

void prefetch_map(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) { map_at(w, i.address[0], lane); });
}

template <bool load>
void copy_tensor(Warp& w, Instruction const& i) {
  // In the order of the operands: a load's are [to], [map, {coordinates}], [mbarrier], a store's [map, ...], [from].
  Address const &map = i.address[load ? 1 : 0], &shared = i.address[load ? 0 : 1];
  for_lanes(w.active, [&](int lane) {
    BulkCopy copy{};
    copy.load = load;
    copy.lane = lane;
    copy.map = map_at(w, map, lane);
    copy.shared = shared_address_of(w, shared, lane);
    if (load) copy.mbarrier = shared_address_of(w, i.address[2], lane);
    if (copy.map.rank != i.number || i.elements != i.number) w.fail("a tensor of another rank");
    for (uint32_t d = 0; d < i.number; ++d) copy.origin[d] = w.at<int32_t>(i.operand[d])[lane];
    w.block.ask_for(w, copy);
  });
}

void commit_group(Warp& w, Instruction const&) { w.block.commit_bulk_group(w); }
void wait_group(Warp& w, Instruction const& i) {
  w.block.wait_for_bulk_groups(w, w.at<uint32_t>(i.operand[0])[first_lane(w.active)]);
}

}  // namespace

void add_bulk_copies(Opcodes& ops) {
  Alternatives const hint{"", ".L2::cache_hint"};
  for (uint32_t rank = 1; rank <= 5; ++rank) {
    std::string const tensor = "cp.async.bulk.tensor." + std::to_string(rank) + "d";
    Alternatives const to{".shared::cluster", ".shared::cta"};
    ops.add(spell({{tensor}, to, {".global.mbarrier::complete_tx::bytes"}, hint}), copy_tensor<true>,
            {kAddress, kAddress, kAddress, kIgnored.or_nothing()}, rank);
    ops.add(spell({{tensor}, {".global.shared::cta.bulk_group"}, hint}), copy_tensor<false>,
            {kAddress, kAddress, kIgnored.or_nothing()}, rank);
  }
  ops.add({"prefetch.tensormap", "prefetch.param.tensormap"}, prefetch_map, {kAddress});
  ops.add({"cp.async.bulk.commit_group"}, commit_group, {});
  ops.add({"cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"}, wait_group, {in<uint32_t>()});
}

}  // namespace simulator
