#include "checkpoint/run_lease.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "core/json_node.h"
#include "core/process.h"
#include "core/thread.h"
#include "offload/file_system.h"
#include "tranche/core/error.h"

namespace tranche::checkpoint {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

/// Every record has this size, so that one write replaces another.
constexpr std::size_t record_bytes = 512;

struct Record {
  detail::ProcessIdentity owner;
  std::string token;
  std::int64_t since = 0;  ///< seconds since 1970, for people
  std::int64_t beat = 0;
};

std::string text_of(const Record& record) {
  std::string text = json{
      {"host", record.owner.node},
      {"kernel", record.owner.kernel},
      {"process", record.owner.process},
      {"started", record.owner.started},
      {"token", record.token},
      {"since", record.since},
      {"beat",
       record.beat}}.dump(-1, ' ', false, json::error_handler_t::replace);
  text.resize(record_bytes - 1, ' ');
  return text + "\n";
}

/// Parses a record. For an invalid text it returns a record without owner, whose process counts as not
/// running.
Record record_of(const std::string& text) {
  Record record{{"an unknown node", "", 0, 0}, "", 0, 0};
  try {
    const detail::JsonNode fields = detail::JsonNode::read<CheckpointError>(text, "a lease");
    record.owner = {fields["host"].text(), fields["kernel"].text(), fields["process"].integer(),
                    static_cast<std::uint64_t>(fields["started"].integer(0))};
    record.token = fields["token"].text();
    record.since = fields["since"].integer();
    record.beat = fields["beat"].integer();
  } catch (const CheckpointError&) {
  }
  return record;
}

std::string describe(const Record& record) {
  if (record.owner.process == 0) return "another process";
  std::string text = fmt::format("process {} on node {}", record.owner.process, record.owner.node);
  const auto since = static_cast<std::time_t>(record.since);
  std::tm utc{};
  if (record.since > 0 && ::gmtime_r(&since, &utc) != nullptr) {
    text += fmt::format(", since {:%Y-%m-%d %H:%M:%S} UTC", utc);
  }
  return text;
}

std::string draw_token() {
  std::random_device draw;
  return fmt::format("{:08x}{:08x}", draw(), draw());
}

/// Repeats a system call while signals interrupt it.
template <class Call>
auto uninterrupted(Call call) {
  for (;;) {
    const auto result = call();
    if (result >= 0 || errno != EINTR) return result;
  }
}

/// An open file, closed by destruction.
class LeaseFile {
 public:
  LeaseFile() = default;
  LeaseFile(const std::string& path, int flags)
      : descriptor_(uninterrupted(
            [&] { return ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666); })) {
    struct stat status {};
    if (descriptor_ < 0) {
      error_ = errno;
    } else if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
      error_ = EINVAL;
      close();
    }
  }
  LeaseFile(LeaseFile&& other) noexcept { *this = std::move(other); }
  LeaseFile& operator=(LeaseFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(error_, other.error_);
    return *this;
  }
  ~LeaseFile() { close(); }

  explicit operator bool() const { return descriptor_ >= 0; }
  int error() const { return error_; }
  /// Returns 0, or the error: EWOULDBLOCK when another process has the lock.
  int lock() {
    return uninterrupted([&] { return ::flock(descriptor_, LOCK_EX | LOCK_NB); }) == 0 ? 0 : errno;
  }
  /// The whole text; nullopt with errno set on failure.
  std::optional<std::string> read() const {
    std::array<char, record_bytes> bytes{};
    std::size_t done = 0;
    while (done < bytes.size()) {
      const auto count = uninterrupted([&] {
        return ::pread(descriptor_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
      });
      if (count < 0) return std::nullopt;
      if (count == 0) break;
      done += static_cast<std::size_t>(count);
    }
    return std::string(bytes.data(), done);
  }
  /// False with errno set on failure.
  bool write(const std::string& text) {
    for (std::size_t done = 0; done < text.size();) {
      const auto count = uninterrupted([&] {
        return ::pwrite(descriptor_, text.data() + done, text.size() - done, static_cast<off_t>(done));
      });
      if (count <= 0) return false;
      done += static_cast<std::size_t>(count);
    }
    return uninterrupted([&] { return ::fdatasync(descriptor_); }) == 0;
  }
  void clear() {
    if (::ftruncate(descriptor_, 0) != 0) return;  // the process ends, and so does its lease
  }

 private:
  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }
  int descriptor_ = -1;
  int error_ = 0;
};

}  // namespace

struct RunLease::Impl {
  Impl(std::string in, LeaseOptions with)
      : folder(std::move(in)),
        path(detail::join_path(folder, std::string(lease_name))),
        options(std::move(with)) {}
  ~Impl() {
    {
      const std::lock_guard guard(mutex);
      ending = true;
    }
    end.notify_all();
    if (heart.joinable()) heart.join();
    if (file && record_of(file.read().value_or("")).token == token) file.clear();
  }

  /// Reads the whole text through a new descriptor, because network file systems then ask their server. Empty
  /// if there is no file; nullopt, with errno set, if it cannot be read.
  std::optional<std::string> look() const {
    const LeaseFile opened(path, O_RDONLY);
    if (opened) return opened.read();
    if (opened.error() == ENOENT) return std::string();
    errno = opened.error();
    return std::nullopt;
  }
  [[noreturn]] void refuse(const Record& holder) const {
    throw CheckpointError(fmt::format("{} is in use by {}: {}", folder, describe(holder), options.advice));
  }
  [[noreturn]] void fail(std::string_view done, int error) const {
    throw CheckpointError(fmt::format("{} cannot be {}: {}", path, done, std::strerror(error)));
  }
  void take();
  void await_death(const Record& holder, const std::string& text) const;
  void beat();

  const std::string folder, path;
  const LeaseOptions options;
  std::mutex mutex;  ///< guards the members below
  std::condition_variable end;
  bool ending = false;
  LeaseFile file;  ///< locked if possible; not open: another object of this process holds it
  std::string token;
  std::atomic<bool> lost = false;
  std::thread heart;  ///< runs while `file` is open
};

void RunLease::Impl::await_death(const Record& holder, const std::string& text) const {
  if (options.say) {
    options.say(fmt::format("{} is held by {}: waiting up to {:.0f} s for a sign of life", folder,
                            describe(holder), options.stale_seconds));
  }
  const auto begin = Clock::now();
  while (std::chrono::duration<double>(Clock::now() - begin).count() < options.stale_seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(options.beat_seconds / 10));
    const auto now = look();
    if (!now) continue;
    if (now->empty()) return;  // released by its holder
    if (*now != text) refuse(record_of(*now));
  }
}

void RunLease::Impl::take() {
  LeaseFile opened(path, O_RDWR | O_CREAT);
  if (!opened) fail("written", opened.error());
  const int refused = opened.lock();
  const auto found = opened.read();
  if (!found) fail("read", errno);
  const std::string& text = *found;
  const Record holder = record_of(text);
  const detail::ProcessIdentity self = detail::this_process();
  if (refused == EWOULDBLOCK && holder.owner == self) {
    token = holder.token;
    return;
  }
  if (refused == EWOULDBLOCK) refuse(holder);
  if (!text.empty()) {
    if (!holder.owner.same_kernel(self)) {
      await_death(holder, text);
    } else if (refused != 0 && holder.owner == self) {  // the file system has no locks
      token = holder.token;
      return;
    } else if (refused != 0 && detail::is_running(holder.owner)) {
      refuse(holder);
    }
  }
  token = draw_token();
  const Record own{self, token, static_cast<std::int64_t>(std::time(nullptr)), 0};
  if (!opened.write(text_of(own))) fail("written", errno);
  file = std::move(opened);
  if (!heart.joinable()) heart = detail::start_quiet_thread([this] { beat(); });
}

void RunLease::Impl::beat() {
  std::unique_lock guard(mutex);
  const auto pause = std::chrono::duration<double>(options.beat_seconds);
  while (!end.wait_for(guard, pause, [this] { return ending; })) {
    Record record = record_of(look().value_or(""));
    if (record.token.empty()) continue;  // removed, torn or unreadable: require_held() handles it
    if (record.token != token) {
      lost = true;
      continue;
    }
    ++record.beat;
    (void)file.write(text_of(record));  // a failed beat is repeated next time
  }
}

RunLease::RunLease(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RunLease::RunLease(RunLease&&) noexcept = default;
RunLease::~RunLease() = default;

RunLease RunLease::take(const std::string& folder, const LeaseOptions& options) {
  auto impl = std::make_unique<Impl>(folder, options);
  const std::lock_guard guard(impl->mutex);
  impl->take();
  return RunLease(std::move(impl));
}

bool RunLease::lost() const noexcept {
  return impl_->lost;
}

void RunLease::require_held() {
  const std::lock_guard guard(impl_->mutex);
  const auto text = impl_->look();
  if (!text) impl_->fail("read", errno);
  const Record record = record_of(*text);
  if (record.token == impl_->token) return;
  if (text->empty()) return impl_->take();
  throw CheckpointError(
      fmt::format("{} was taken over by {}, which took this run for dead: this run saves nothing more there; "
                  "what it has saved stays",
                  impl_->folder, describe(record)));
}

}  // namespace tranche::checkpoint
