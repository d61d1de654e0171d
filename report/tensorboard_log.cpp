#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "report/log_folder.h"
#include "tranche/core/error.h"
#include "tranche/report/scalar_log.h"

namespace tranche {

namespace {

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4), rotated and offset as TFRecord stores it, so that checksums
/// of data that contains checksums remain meaningful.
std::uint32_t masked_checksum(std::string_view data) {
  std::uint32_t crc = 0xffffffffu;
  for (const char c : data) {
    crc ^= static_cast<unsigned char>(c);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return std::rotr(~crc, 15) + 0xa282ead8u;
}

template <class Value>
std::string little_endian(Value value) {
  static_assert(std::endian::native == std::endian::little);
  std::array<char, sizeof(Value)> bytes{};
  std::memcpy(bytes.data(), &value, sizeof value);
  return {bytes.data(), bytes.size()};
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes += static_cast<char>(value);
}

/// A field of a protocol buffer: its number, the wire type, the content.
enum class Wire : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };
std::string field(std::uint64_t number, Wire wire, const std::string& content) {
  const std::string length = wire == Wire::bytes ? varint(content.size()) : std::string();
  return varint(number << 3 | static_cast<std::uint64_t>(wire)) + length + content;
}

class TensorboardLog : public ScalarLog {
 public:
  TensorboardLog(const std::string& folder, std::int64_t last_step) {
    detail::make_log_folder(folder);
    const double now = seconds_since_epoch();
    // The name must contain "tfevents"; the time puts the files of a run in order.
    for (int number = 0;; ++number) {
      path_ =
          (std::filesystem::path(folder) / fmt::format("events.out.tfevents.{:010}.{}.{}",
                                                       static_cast<std::int64_t>(now), ::getpid(), number))
              .string();
      if (!std::filesystem::exists(path_)) break;
    }
    file_.open(path_, std::ios::binary);
    write(event(0) + field(3, Wire::bytes, "brain.Event:2"));
    // SessionLog with status START: earlier files' points at this step and beyond are no longer shown.
    write(event(last_step > 0 ? last_step + 1 : 0) +
          field(7, Wire::bytes, field(1, Wire::varint, varint(1))));
    flush();
  }

  void add(std::int64_t step, std::span<const Scalar> scalars) override {
    std::string values;
    for (const Scalar& scalar : scalars) {
      values += field(1, Wire::bytes,
                      field(1, Wire::bytes, scalar.tag) +
                          field(2, Wire::fixed32, little_endian(static_cast<float>(scalar.value))));
    }
    write(event(step) + field(5, Wire::bytes, values));
    flush();
  }

 private:
  static double seconds_since_epoch() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }
  static std::string event(std::int64_t step) {
    const std::string time = field(1, Wire::fixed64, little_endian(seconds_since_epoch()));
    return step == 0 ? time : time + field(2, Wire::varint, varint(static_cast<std::uint64_t>(step)));
  }
  void write(const std::string& record) {
    const std::string length = little_endian(static_cast<std::uint64_t>(record.size()));
    file_ << length << little_endian(masked_checksum(length)) << record
          << little_endian(masked_checksum(record));
  }
  void flush() {
    if (!file_.flush()) detail::fail_to_log(path_);
  }

  std::string path_;
  std::ofstream file_;
};

}  // namespace

std::unique_ptr<ScalarLog> make_tensorboard_log(const std::string& folder, std::int64_t last_step) {
  return std::make_unique<TensorboardLog>(folder, last_step);
}

}  // namespace tranche
