// Loads, stores and atomics, and addresses of the several kinds of memory.
#include <cstring>

#include "block.h"
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

template <class T>
void load(Warp& w, Instruction const& i) {
  size_t const bytes = sizeof(T) * i.elements;
  for_lanes(w.active, [&](int lane) {
    T values[4];
    std::memcpy(values, memory(w, static_cast<Space>(i.number), address_of(w, i.address[0], lane), bytes), bytes);
    for (uint32_t e = 0; e < i.elements; ++e) w.put(i.operand[e], i.bits[0], lane, static_cast<uint64_t>(values[e]));
  });
}

template <class T>
void store(Warp& w, Instruction const& i) {
  size_t const bytes = sizeof(T) * i.elements;
  for_lanes(w.active, [&](int lane) {
    T values[4];
    for (uint32_t e = 0; e < i.elements; ++e) values[e] = static_cast<T>(w.get(i.operand[e], i.bits[0], lane));
    std::memcpy(memory(w, static_cast<Space>(i.number), address_of(w, i.address[0], lane), bytes), values, bytes);
  });
}

constexpr std::pair<char const*, Space> kSpaces[] = {
    {"", kGeneric}, {".global", kOrdinary}, {".const", kOrdinary}, {".param", kOrdinary}, {".shared", kShared}};

template <class T>
void add_type(Opcodes& ops, Alternatives const& types) {
  for (auto const& [name, space] : kSpaces) {
    for (int n : {1, 2, 4}) {
      std::string const vector = n == 1 ? "" : ".v" + std::to_string(n);
      ops.add(spell({{"ld"}, {name + vector}, types}), load<T>, {out<T>().of(n).of_any_width(), kAddress}, space);
      ops.add(spell({{"st"}, {name + vector}, types}), store<T>, {kAddress, in<T>().of(n).of_any_width()}, space);
    }
  }
}

/// Lanes take effect one after the other, in no order that a program may rely on; so do neighbouring elements.
void add_to_memory(Warp& w, Instruction const& i) {
  size_t const bytes = sizeof(float) * i.elements;
  for_lanes(w.active, [&](int lane) {
    std::byte* at = memory(w, kOrdinary, address_of(w, i.address[0], lane), bytes);
    for (uint32_t e = 0; e < i.elements; ++e, at += sizeof(float)) {
      float sum;
      std::memcpy(&sum, at, sizeof(sum));
      sum += w.at<float>(i.operand[e])[lane];
      std::memcpy(at, &sum, sizeof(sum));
    }
  });
}

/// From addresses of shared memory to generic ones, which are the process's own.
void convert_shared_address(Warp& w, Instruction const& i) {
  Lanes<uint64_t> result = w.at<uint64_t>(i.operand[1]);
  for (uint64_t& address : result.lane) address += w.block.shared_window();
  w.write(i.operand[0], result);
}

}  // namespace

void add_memory(Opcodes& ops) {
  add_type<uint8_t>(ops, {".u8", ".b8"});
  add_type<uint16_t>(ops, {".u16", ".b16"});
  add_type<uint32_t>(ops, {".u32", ".b32", ".f32", ".s32"});
  add_type<uint64_t>(ops, {".u64", ".b64"});
  ops.add({"red.global.add.f32"}, add_to_memory, {kAddress, in<float>()});
  ops.add({"red.global.add.v4.f32"}, add_to_memory, {kAddress, in<float>().of(4)});

  add_elementwise<[](uint64_t a) { return a; }>(ops, {"cvta.global.u64", "cvta.param.u64", "cvta.to.global.u64"});
  ops.add({"cvta.shared.u64"}, convert_shared_address, {out<uint64_t>(), in<uint64_t>()});
  ops.add({"prefetch.global.L2"}, do_nothing, {kAddress});
}

}  // namespace simulator
