// TMA: boxes of tensors between global and shared memory, copied at a moment of the simulator's choice.
#include <algorithm>
#include <cstring>

#include "block.h"
#include "opcodes.h"

namespace simulator {

constexpr uint32_t kElement = 2;  // bytes
constexpr uint32_t kPiece = 16;   // bytes that stay together

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      cuuint64_t const* extents, cuuint64_t const* strides, cuuint32_t const* box,
                      cuuint32_t const* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  bool const is_half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // CU_TENSOR_MAP_SWIZZLE_32B and those that follow; what comes behind 128B is not simulated.
  uint32_t const span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16u << swizzle, row = box[0] * kElement;
  TensorMap result{
      kTensorMapMark, reinterpret_cast<uint64_t>(address), {kElement}, {}, {}, static_cast<uint16_t>(span)};
  bool valid = rank == 4 && is_half && span <= 128 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
               fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && reinterpret_cast<uint64_t>(map) % 64 == 0 && address &&
               result.address % 16 == 0 && row % kPiece == 0 && (span == 0 || row <= span);
  for (cuuint32_t i = 0; i < 4 && valid; ++i) {
    result.extents[i] = extents[i];
    if (i > 0) result.strides[i] = strides[i - 1];
    result.box[i] = static_cast<uint16_t>(box[i]);
    valid = extents[i] > 0 && extents[i] <= uint64_t(1) << 32 && box[i] > 0 && box[i] <= 256 &&
            element_strides[i] == 1 &&
            (i == 0 || (result.strides[i] % 16 == 0 && result.strides[i] < uint64_t(1) << 40));
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &result, sizeof(result));
  return CUDA_SUCCESS;
}

namespace {

/// Where the copy unit puts what would be at a shared address: in each span of a row the 16-byte pieces change places,
/// as the address bits from 128 bytes on say.
uint32_t swizzled(uint32_t address, uint32_t span) {
  return span == 0 ? address : address ^ (address >> 3 & (span - 1) & ~uint32_t(15));
}

uint32_t box_bytes(TensorMap const& map) { return kElement * map.box[0] * map.box[1] * map.box[2] * map.box[3]; }

/// Calls f(shared offset, address, bytes) for each piece of a box in shared memory, with the bytes at its beginning
/// that are inside of the tensor.
template <class F>
void for_pieces(BulkCopy const& copy, F const& f) {
  TensorMap const& map = copy.map;
  uint32_t const row_bytes = map.box[0] * kElement, all = box_bytes(map);
  for (uint32_t row = 0; row < all / row_bytes; ++row) {
    uint64_t address = map.address;
    bool inside = true;
    uint32_t rest = row;
    for (int d = 1; d < 4; ++d) {
      int64_t const index = int64_t(copy.origin[d]) + rest % map.box[d];
      rest /= map.box[d];
      inside = inside && index >= 0 && static_cast<uint64_t>(index) < map.extents[d];
      address += static_cast<uint64_t>(index) * map.strides[d];
    }
    // The copy unit cuts a row off at both ends; the beginning of these tensors' rows is never before theirs.
    for (uint32_t piece = 0; piece < row_bytes; piece += kPiece) {
      int64_t const begin = int64_t(copy.origin[0]) * kElement + piece;
      int64_t const left = static_cast<int64_t>(map.extents[0]) * kElement - begin;
      auto const bytes = static_cast<uint32_t>(inside ? std::clamp<int64_t>(left, 0, kPiece) : 0);
      f(row * row_bytes + piece, address + static_cast<uint64_t>(begin), bytes);
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
}

void Block::make(BulkCopy const& copy) {
  for_pieces(copy, [&](uint32_t offset, uint64_t address, uint32_t bytes) {
    std::byte* const here = shared_.get() + swizzled(copy.shared + offset, copy.map.swizzle);
    if (copy.load) {
      std::memset(here, 0, kPiece);
      std::memcpy(here, reinterpret_cast<void const*>(address), bytes);
    } else {
      std::memcpy(reinterpret_cast<void*>(address), here, bytes);
    }
  });
  Warp const& warp = warps_[static_cast<size_t>(copy.warp)];
  if (copy.load) arrive_at_mbarrier(warp, copy.mbarrier, 0, -int64_t(box_bytes(copy.map)));
}

void Block::commit_bulk_group(Warp const& warp) {
  for_lanes(warp.active, [&](int lane) { ++bulk_groups_[static_cast<size_t>(warp.number)][lane]; });
}

void Block::wait_for_bulk_groups(Warp const& warp, uint32_t groups) {
  Lanes<uint32_t> const& committed = bulk_groups_[static_cast<size_t>(warp.number)];
  std::erase_if(bulk_copies_, [&](BulkCopy const& copy) {
    bool const over = !copy.load && copy.warp == warp.number && (warp.active >> copy.lane & 1) &&
                      uint64_t(copy.group) + groups < committed[copy.lane];
    if (over) make(copy);
    return over;
  });
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
  if (i.elements != 4) w.fail("a tensor of another rank");
  for_lanes(w.active, [&](int lane) {
    BulkCopy copy{.map = map_at(w, map, lane), .load = load, .warp = w.number, .lane = lane};
    copy.shared = shared_address_of(w, shared, lane);
    if (load) copy.mbarrier = shared_address_of(w, i.address[2], lane);
    for (uint32_t d = 0; d < 4; ++d) copy.origin[d] = w.at<int32_t>(i.operand[d])[lane];
    w.block.ask_for(w, copy);
  });
}

void commit_group(Warp& w, Instruction const&) { w.block.commit_bulk_group(w); }
void wait_group(Warp& w, Instruction const& i) { w.block.wait_for_bulk_groups(w, w.uniform(i.operand[0])); }

}  // namespace

void add_bulk_copies(Opcodes& ops) {
  std::string const tensor = "cp.async.bulk.tensor.4d.";
  ops.add(
      spell({{tensor}, {"shared::cluster", "shared::cta"}, {".global.mbarrier::complete_tx::bytes.L2::cache_hint"}}),
      copy_tensor<true>, {kAddress, kAddress, kAddress, kIgnored});
  ops.add({tensor + "global.shared::cta.bulk_group"}, copy_tensor<false>, {kAddress, kAddress});
  ops.add({"prefetch.tensormap"}, prefetch_map, {kAddress});
  ops.add({"cp.async.bulk.commit_group"}, commit_group, {});
  ops.add({"cp.async.bulk.wait_group.read"}, wait_group, {in<uint32_t>()});
}

}  // namespace simulator
