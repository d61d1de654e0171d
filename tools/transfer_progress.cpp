#include "tools/transfer_progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/clock.h"
#include "tools/train/progress.h"
#include "tranche/device/ledger.h"

namespace tranche::tools {

namespace {

constexpr double redraw_seconds = 0.2;
constexpr double line_seconds = 30;

std::string rate(std::int64_t bytes, double seconds) {
  return format_bytes(static_cast<std::int64_t>(static_cast<double>(bytes) / std::max(seconds, 1e-6))) + "/s";
}

}  // namespace

TransferProgress::TransferProgress(std::string verb, std::int64_t total, bool terminal, Writer write,
                                   Clock clock)
    : verb_(std::move(verb)),
      total_(total),
      terminal_(terminal),
      write_(std::move(write)),
      clock_(std::move(clock)),
      start_(clock_()),
      shown_(start_) {}

TransferProgress::TransferProgress(std::string verb, std::int64_t total, bool terminal, Writer write)
    : TransferProgress(std::move(verb), total, terminal, std::move(write), detail::seconds_now) {}

void TransferProgress::add(std::int64_t bytes) {
  done_ += bytes;
  const double now = clock_();
  if (now - shown_ < (terminal_ ? redraw_seconds : line_seconds)) return;
  shown_ = now;
  std::string text = line(now - start_);
  if (terminal_) {
    const std::size_t size = text.size();
    text.resize(std::max(size, drawn_), ' ');
    drawn_ = size;
    write_("\r" + text);
  } else {
    write_(text + "\n");
  }
}

void TransferProgress::finish() {
  if (drawn_ > 0) write_("\r" + std::string(drawn_, ' ') + "\r");
  drawn_ = 0;
}

std::string TransferProgress::line(double seconds) const {
  std::string text =
      fmt::format("{} {} of {}, {}", verb_, format_bytes(done_), format_bytes(total_), rate(done_, seconds));
  if (done_ > 0 && done_ < total_) {
    const double left = seconds / static_cast<double>(done_) * static_cast<double>(total_ - done_);
    text += ", " + format_duration(left) + " left";
  }
  return text;
}

std::string TransferProgress::summary() const {
  const double spent = seconds();
  return fmt::format("{} in {:.1f} s, {}", format_bytes(done_), spent, rate(done_, spent));
}

}  // namespace tranche::tools
