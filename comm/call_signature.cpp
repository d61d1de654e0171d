#include "comm/call_signature.h"

#include <fmt/format.h>

#include "comm/transport/operation.h"

namespace tranche::comm {

namespace {

template <std::size_t size>
void put(std::array<char, size>& field, std::string_view text) {
  text.copy(field.data(), size - 1);
}

std::string said(const CallSignature& signature, bool with_bytes, const RankNames& names) {
  return fmt::format("{} issued {}{} (number {})", names.of(signature.rank),
                     describe(signature.operation.data(), signature.unit.data(), {}),
                     with_bytes ? fmt::format(" of {} bytes", signature.bytes) : "", signature.number);
}

}  // namespace

std::uint32_t hash_of_call(std::string_view operation, std::string_view unit) {
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const std::string_view text : {operation, std::string_view("\n"), unit}) {
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  }
  return hash;
}

CallSignature make_call_signature(int rank, const Tag& tag, std::int64_t bytes, std::string_view operation,
                                  std::string_view unit) {
  CallSignature signature;
  signature.rank = rank;
  signature.context = tag.context;
  signature.number = tag.sequence;
  signature.bytes = bytes;
  put(signature.operation, operation);
  put(signature.unit, unit);
  return signature;
}

std::string difference(const CallSignature& one, const CallSignature& other, const RankNames& names) {
  const bool same = one.operation == other.operation && one.unit == other.unit;
  if (same && one.bytes == other.bytes) return {};
  const CallSignature &first = one.rank < other.rank ? one : other,
                      &second = one.rank < other.rank ? other : one;
  return said(first, same, names) + " where " + said(second, same, names) + ": the ranks' calls differ";
}

}  // namespace tranche::comm
