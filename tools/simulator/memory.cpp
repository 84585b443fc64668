// Loads, stores and atomics, and addresses of the several kinds of memory. Asynchronous copies. cp.async: threads' own
// to shared memory, which happen as late as they may, since a program that is right doesn't notice. TMA: boxes of
// tensors between global and shared memory, at a moment of the simulator's choice. Until then their destination in
// shared memory is NaN.
#include <algorithm>
#include <cstring>

#include "opcodes.h"

namespace simulator {
namespace {

enum Space : uint32_t { kGeneric, kOrdinary, kShared };
constexpr uint64_t kFirstPage = 65536;  // nothing is ever there

/// The memory at an address: global, constant and parameter memory is the process's own.
std::byte* memory(Warp& w, Space space, uint64_t address, uint32_t bytes) {
  uint64_t const offset = address - w.block.shared_window();
  if (space == kGeneric && offset < kSharedWindow) space = kShared, address = offset;
  if (space == kShared) return w.block.shared(w, static_cast<uint32_t>(address), bytes);
  if (address < kFirstPage) w.fail("address " + std::to_string(address));
  if (address % bytes != 0) w.fail("address " + std::to_string(address) + " is not aligned");
  return reinterpret_cast<std::byte*>(address);
}

// ---- ld and st -----------------------------------------------------------------------------------------------------

template <class T, bool stores>
void access(Warp& w, Instruction const& i) {
  uint32_t const bytes = sizeof(T) * i.elements;
  for_lanes(w.active, [&](int lane) {
    std::byte* const at = memory(w, static_cast<Space>(i.number), address_of(w, i.address[0], lane), bytes);
    T values[4];
    if (!stores) std::memcpy(values, at, bytes);
    for (uint32_t e = 0; e < i.elements; ++e) {
      if (stores) values[e] = static_cast<T>(w.get(i.operand[e], i.bits[0], lane));
      if (!stores) w.put(i.operand[e], i.bits[0], lane, static_cast<uint64_t>(values[e]));
    }
    if (stores) std::memcpy(at, values, bytes);
  });
}

std::pair<std::string, Space> const kSpaces[] = {
    {"", kGeneric}, {".global", kOrdinary}, {".const", kOrdinary}, {".param", kOrdinary}, {".shared", kShared}};

template <class T>
void add_type(Opcodes& ops) {
  for (auto const& [name, space] : kSpaces) {
    for (int n : {1, 2, 4}) {
      Slot const loaded = out<T>().of(n).of_any_width(), stored = in<T>().of(n).of_any_width();
      std::string const what = name + (n == 1 ? "" : ".v" + std::to_string(n)) + ".b" + std::to_string(8 * sizeof(T));
      ops.add({"ld" + what}, access<T, false>, {loaded, kAddress}, space);
      ops.add({"st" + what}, access<T, true>, {kAddress, stored}, space);
    }
  }
}

/// Lanes take effect one after the other, in no order that a program may rely on; so do neighbouring elements.
void add_to_memory(Warp& w, Instruction const& i) {
  size_t const bytes = sizeof(float) * i.elements;
  for_lanes(w.active, [&](int lane) {
    std::byte* const at = memory(w, kOrdinary, address_of(w, i.address[0], lane), bytes);
    float sums[4];
    std::memcpy(sums, at, bytes);
    for (uint32_t e = 0; e < i.elements; ++e) sums[e] += w.at<float>(i.operand[e])[lane];
    std::memcpy(at, sums, bytes);
  });
}

/// From addresses of shared memory to generic ones, which are the process's own.
void convert_shared_address(Warp& w, Instruction const& i) {
  Lanes<uint64_t> result = w.at<uint64_t>(i.operand[1]);
  for (uint64_t& address : result.lane) address += w.block.shared_window();
  w.write(i.operand[0], result);
}

}  // namespace

// ---- cp.async ------------------------------------------------------------------------------------------------------

void Warp::make(AsyncCopy& copy, Mask lanes) {
  for_lanes(copy.lanes & lanes, [&](int lane) {
    std::byte* const to = block.shared(*this, copy.destination[lane], copy.bytes);
    uint32_t const bytes = copy.read[lane];
    std::memcpy(to, reinterpret_cast<void const*>(copy.source[lane]), bytes);
    std::memset(to + bytes, 0, copy.bytes - bytes);
  });
  copy.lanes &= ~lanes;
}

bool Warp::deliver_arrival() {
  auto const arrival = std::ranges::find(copies, 0u, &AsyncCopy::bytes);
  if (arrival == copies.end()) return false;
  for (auto copy = copies.begin(); copy != arrival; ++copy) make(*copy, arrival->lanes);
  for_lanes(arrival->lanes, [&](int lane) { block.arrive_at_mbarrier(*this, arrival->destination[lane], 1, 0); });
  arrival->lanes = 0;
  std::erase_if(copies, [](AsyncCopy const& c) { return c.lanes == 0; });
  return true;
}

namespace {

/// Operands: the bytes to copy, and how many of them to read, which may be left out.
void copy_async(Warp& w, Instruction const& i) {
  AsyncCopy copy{.lanes = w.active, .bytes = w.uniform(i.operand[0]), .group = w.commits};
  if (copy.bytes != 16 && (i.number == 16 || (copy.bytes != 4 && copy.bytes != 8))) w.fail("a copy of this size");
  for_lanes(w.active, [&](int lane) {
    uint32_t const to = copy.destination[lane] = shared_address_of(w, i.address[0], lane);
    copy.source[lane] = address_of(w, i.address[1], lane);
    copy.read[lane] = i.count >= 4 ? std::min(w.at<uint32_t>(i.operand[1])[lane], copy.bytes) : copy.bytes;
    if (copy.source[lane] % copy.bytes != 0) w.fail("source address is not aligned");
    w.block.shared(w, to, copy.bytes);
    w.block.poison(to, copy.bytes);
  });
  w.copies.push_back(copy);
}

/// Makes the active lanes' copies, but for their last groups, and those that are not committed.
void wait_for_copies(Warp& w, Instruction const& i) {
  bool const all = i.count == 0;
  uint32_t const groups = all ? 0 : w.uniform(i.operand[0]);
  for (AsyncCopy& copy : w.copies) {
    if (copy.bytes == 0) continue;
    auto const over = [&](int lane) { return all || uint64_t(copy.group[lane]) + groups < w.commits[lane]; };
    w.make(copy, w.active & mask_of(over));
  }
  while (!w.copies.empty() && w.copies.front().lanes == 0) w.copies.pop_front();
}

void arrive_noinc(Warp& w, Instruction const& i) {
  AsyncCopy arrival{.lanes = w.active, .group = w.commits};
  for_lanes(w.active, [&](int lane) { arrival.destination[lane] = shared_address_of(w, i.address[0], lane); });
  w.copies.push_back(arrival);
}

void commit(Warp& w, Lanes<uint32_t>& groups) {
  for_lanes(w.active, [&](int lane) { ++groups[lane]; });
}

}  // namespace

// ---- TMA -----------------------------------------------------------------------------------------------------------

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
  if (valid) std::memcpy(map, &result, sizeof(result));
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

namespace {

/// Where the copy unit puts what would be at a shared address: in each span of a row the 16-byte pieces change places,
/// as the address bits from 128 bytes on say.
uint32_t swizzled(uint32_t address, uint32_t span) {
  return span == 0 ? address : address ^ (address >> 3 & (span - 1) & ~uint32_t(15));
}

uint32_t box_bytes(TensorMap const& map) { return kElement * map.box[0] * map.box[1] * map.box[2] * map.box[3]; }

}  // namespace

void Block::ask_for(Warp const& warp, BulkCopy const& copy) {
  uint32_t const bytes = box_bytes(copy.map);
  if (copy.shared % 128 != 0) warp.fail("a box at shared address " + std::to_string(copy.shared) + ": not aligned");
  if (copy.origin[0] < 0) warp.fail("boxes that begin before a row are not simulated");
  shared(warp, copy.shared, kPiece);
  shared(warp, copy.shared + bytes - kPiece, kPiece);
  if (copy.load) poison(copy.shared, bytes);
  bulk_copies_.push_back(copy);
}

/// Piece by piece of the box in shared memory. What is outside of the tensor is read as zero, and not written.
void Block::make(BulkCopy const& copy) {
  TensorMap const& map = copy.map;
  uint32_t const row_bytes = map.box[0] * kElement, all = box_bytes(map);
  for (uint32_t offset = 0; offset < all; offset += kPiece) {
    // The copy unit cuts a row off at both ends; the beginning of these tensors' rows is never before theirs.
    int64_t const begin = int64_t(copy.origin[0]) * kElement + offset % row_bytes;
    auto bytes = std::clamp<int64_t>(static_cast<int64_t>(map.extents[0]) * kElement - begin, 0, kPiece);
    uint64_t address = map.address + static_cast<uint64_t>(begin);
    for (uint32_t d = 1, rest = offset / row_bytes; d < 4; rest /= map.box[d++]) {
      auto const index = static_cast<uint64_t>(int64_t(copy.origin[d]) + rest % map.box[d]);
      if (index >= map.extents[d]) bytes = 0;
      address += index * map.strides[d];
    }
    std::byte* const here = shared_.get() + swizzled(copy.shared + offset, map.swizzle);
    auto* const there = reinterpret_cast<std::byte*>(address);
    if (copy.load) std::memset(here, 0, kPiece);
    std::memcpy(copy.load ? here : there, copy.load ? there : here, static_cast<size_t>(bytes));
  }
  if (copy.load) arrive_at_mbarrier(*copy.warp, copy.mbarrier, 0, -int64_t(all));
}

void Block::wait_for_bulk_groups(Warp const& warp, uint32_t groups) {
  std::erase_if(bulk_copies_, [&](BulkCopy const& copy) {
    bool const over = !copy.load && copy.warp == &warp && (warp.active >> copy.lane & 1) &&
                      uint64_t(copy.group) + groups < warp.bulk_commits[copy.lane];
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
  for_lanes(w.active, [&](int lane) {
    BulkCopy copy{.map = map_at(w, map, lane), .load = load, .warp = &w, .lane = lane, .group = w.bulk_commits[lane]};
    copy.shared = shared_address_of(w, shared, lane);
    if (load) copy.mbarrier = shared_address_of(w, i.address[2], lane);
    for (uint32_t d = 0; d < 4; ++d) copy.origin[d] = w.at<int32_t>(i.operand[d])[lane];
    w.block.ask_for(w, copy);
  });
}

}  // namespace

void add_memory(Opcodes& ops) {
  add_type<uint8_t>(ops);
  add_type<uint16_t>(ops);
  add_type<uint32_t>(ops);
  add_type<uint64_t>(ops);
  ops.add({"red.global.add.f32"}, add_to_memory, {kAddress, in<float>()});
  ops.add({"red.global.add.v4.f32"}, add_to_memory, {kAddress, in<float>().of(4)});

  add_elementwise<[](uint64_t a) { return a; }>(ops, {"cvta.global.u64", "cvta.param.u64", "cvta.to.global.u64"});
  ops.add({"cvta.shared.u64"}, convert_shared_address, {out<uint64_t>(), in<uint64_t>()});
  ops.add({"prefetch.global.L2"}, [](Warp&, Instruction const&) {}, {kAddress});

  Slot const value = in<uint32_t>();
  std::vector<Slot> const slots{kAddress, kAddress, value, value.or_nothing()};
  ops.add({"cp.async.cg.shared.global"}, copy_async, slots, 16);
  ops.add({"cp.async.ca.shared.global"}, copy_async, slots, 4);
  ops.add({"cp.async.commit_group"}, [](Warp& w, Instruction const&) { commit(w, w.commits); }, {});
  ops.add({"cp.async.wait_group"}, wait_for_copies, {value});
  ops.add({"cp.async.wait_all"}, wait_for_copies, {});
  ops.add({"cp.async.mbarrier.arrive.noinc.shared.b64"}, arrive_noinc, {kAddress});

  std::string const tensor = "cp.async.bulk.tensor.4d.";
  ops.add({tensor + "shared.global.mbarrier::complete_tx::bytes"}, copy_tensor<true>,
          {kAddress, kAddress, kAddress, kIgnored});
  ops.add({tensor + "global.shared.bulk_group"}, copy_tensor<false>, {kAddress, kAddress});
  ops.add({"prefetch.tensormap"}, prefetch_map, {kAddress});
  ops.add({"cp.async.bulk.commit_group"}, [](Warp& w, Instruction const&) { commit(w, w.bulk_commits); }, {});
  auto const wait = [](Warp& w, Instruction const& i) { w.block.wait_for_bulk_groups(w, w.uniform(i.operand[0])); };
  ops.add({"cp.async.bulk.wait_group.read"}, wait, {value});
}

}  // namespace simulator
