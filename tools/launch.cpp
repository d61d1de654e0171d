#include "tools/launch.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <new>
#include <ostream>
#include <system_error>
#include <thread>
#include <tuple>

#include "checkpoint/digest.h"
#include "comm/peer_failure.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/engine/runtime.h"

namespace tranche::tools {

namespace {

/// The time-out before the configuration is read.
constexpr double start_timeout_seconds = 60;
/// Enough for 65,536 ranks; unused memory is not allocated.
constexpr std::int64_t start_staging_bytes = 1 << 26;

std::unique_ptr<Communicator> make_world() {
  CommunicatorOptions options;
  options.timeout_seconds = start_timeout_seconds;
  options.staging_bytes = start_staging_bytes;
  require_joined_tasks();
  return started_by_mpi_launcher() ? make_mpi_communicator(options) : make_self_communicator(options);
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

Failure describe(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const comm::PeerFailure& failure) {
    return {failure.what(), static_cast<int>(failure.exit_status()), true};
  } catch (const ConfigurationError& usage) {
    // The user's input caused the error, so the position in the sources is left out.
    return {usage.message(), static_cast<int>(usage.exit_status()), false};
  } catch (const IoError& disk) {
    const std::string rank = disk.rank() < 0 ? "" : fmt::format("[rank {}] ", disk.rank());
    return {rank + disk.message(), storage_failed, false};
  } catch (const Error& known) {
    // The same for files and memory; for other errors the position in the sources may help.
    const bool theirs =
        known.exit_status() == ExitStatus::checkpoint || known.exit_status() == ExitStatus::out_of_memory;
    const std::string rank = known.rank() < 0 ? "" : fmt::format("[rank {}] ", known.rank());
    return {theirs ? rank + known.message() : known.what(), static_cast<int>(known.exit_status()), false};
  } catch (const std::bad_alloc&) {
    return {"the system has no memory left for this process", static_cast<int>(ExitStatus::out_of_memory),
            false};
  } catch (const std::system_error& refusal) {
    if (refusal.code() != std::errc::resource_unavailable_try_again) {
      return {refusal.what(), static_cast<int>(ExitStatus::other), false};
    }
    return {
        "the system starts no further thread for this process: raise the limit ('ulimit -u', 'ulimit -v', or "
        "pids.max of the control group)",
        static_cast<int>(ExitStatus::configuration), false};
  } catch (const std::exception& other) {
    return {other.what(), static_cast<int>(ExitStatus::other), false};
  } catch (...) {
    return {"unknown error", static_cast<int>(ExitStatus::other), false};
  }
}

Launch::Launch(std::ostream& errors, const std::vector<Flag>& flags) : Launch(make_world(), errors) {
  for (const Flag& flag : flags) {
    require_same(flag.name, flag.value, "start all ranks with the same command and flags");
  }
}

Launch::Launch(std::unique_ptr<Communicator> world, std::ostream& errors)
    : world_(std::move(world)), errors_(errors) {}

void Launch::require_same(std::string name, std::string value, std::string advice) {
  common_.push_back({std::move(name), std::move(value), std::move(advice)});
}

int Launch::meet(const Failure& failure, std::uint64_t digest, bool& same) {
  // The minimum of each value is reduced: the lowest rank that failed, the negated highest status, the
  // smallest digest, and the complement of the largest.
  const auto number = static_cast<std::int64_t>(digest);
  std::array<std::int64_t, 4> found{failure.status == 0 ? size() : rank(), -failure.status, number, ~number};
  world_
      ->all_reduce(found.data(), 4, DataType::int64, ReduceOperation::minimum,
                   {"start", "agree", Traffic::control})
      .wait();
  if (found[0] == rank()) errors_ << "tranche: " << failure.text << std::endl;
  same = found[2] == ~found[3];
  return static_cast<int>(-found[1]);
}

std::string Launch::difference_to_first() {
  std::string texts;  // names and values of rank 0, each terminated
  for (const Common& common : common_) texts += common.name + '\0' + common.value + '\0';
  texts.resize(static_cast<std::size_t>(broadcast_from_root(static_cast<std::int64_t>(texts.size()))));
  world_
      ->broadcast(texts.data(), static_cast<std::int64_t>(texts.size()), DataType::uint8, 0, {},
                  {"start", "values", Traffic::control})
      .wait();
  std::size_t at = 0;
  const auto next = [&] {
    const std::size_t end = std::min(texts.find('\0', at), texts.size());
    const std::string text = texts.substr(at, end - at);
    at = std::min(end + 1, texts.size());
    return text;
  };
  for (std::size_t i = 0; i < common_.size() || at < texts.size(); ++i) {
    std::string name = next(), value = next();
    const Common own = i < common_.size() ? common_[i] : Common{name, "not given", "start all ranks alike"};
    if (name.empty()) std::tie(name, value) = std::tuple(own.name, "not given");
    if (value == own.value) continue;
    return fmt::format("{} is {} on rank 0, {} is {} on rank {}; {}", name, value, own.name, own.value,
                       rank(), own.advice);
  }
  return {};
}

int Launch::agree(const std::function<void()>& work) {
  Failure failure{"", 0, false};
  try {
    work();
  } catch (...) {
    failure = describe(std::current_exception());
  }
  std::string values;
  for (const Common& common : common_) values += common.value + '\0';
  bool same = true;
  if (const int status = meet(failure, checkpoint::digest_of(values), same); status != 0) return status;
  if (same) return 0;
  const std::string difference = difference_to_first();
  const int status = difference.empty() ? 0 : static_cast<int>(ExitStatus::configuration);
  return meet({difference, status, false}, 0, same);
}

std::int64_t Launch::broadcast_from_root(std::int64_t value) {
  world_->broadcast(&value, 1, DataType::int64, 0, {}, {"start", "first", Traffic::control}).wait();
  return value;
}

std::int64_t Launch::least(std::int64_t value) {
  world_
      ->all_reduce(&value, 1, DataType::int64, ReduceOperation::minimum, {"start", "least", Traffic::control})
      .wait();
  return value;
}

std::string Launch::broadcast_from_root(std::string text) {
  text.resize(static_cast<std::size_t>(broadcast_from_root(static_cast<std::int64_t>(text.size()))));
  if (text.empty()) return text;
  world_
      ->broadcast(text.data(), static_cast<std::int64_t>(text.size()), DataType::uint8, 0, {},
                  {"start", "text", Traffic::control})
      .wait();
  return text;
}

int Launch::fail(const std::exception_ptr& error, double patience, const std::string& advice,
                 Runtime* runtime) {
  Communicator& communicator = runtime != nullptr ? runtime->all() : *world_;
  const int own_rank = communicator.rank(), ranks = communicator.size();
  try {
    std::rethrow_exception(error);
  } catch (Error& known) {
    if (ranks > 1) known.attach_rank(own_rank);
  } catch (...) {
  }
  Failure failure = describe(error);
  if (ranks == 1) {
    errors_ << "tranche: " << failure.text << advice << std::endl;
    return failure.status;
  }
  // The cause is sent without the rank prefix, because each receiver names this rank.
  const std::string own_number = fmt::format("[rank {}] ", own_rank);
  std::string cause =
      failure.text.starts_with(own_number) ? failure.text.substr(own_number.size()) : failure.text;
  if (runtime != nullptr && !runtime->place().empty()) cause = runtime->place() + ": " + cause;
  const Mesh mesh = runtime != nullptr ? runtime->mesh() : Mesh(ranks);
  failure.text = fmt::format("[{}] {}", mesh.name_of_rank(own_rank), cause);
  // An error without its own type concerns this rank only. Typed errors often occur on all ranks at once;
  // then the lowest rank reports it and ends the job before the next one would.
  const bool alone = failure.status == static_cast<int>(ExitStatus::other);
  if (alone) failure.status = static_cast<int>(ExitStatus::communication);
  const double turn = own_rank == 0 ? 0 : std::min(0.375 + 0.125 * own_rank, 1.0) * patience;
  if (!failure.echo) {
    communicator.post_failure(cause, static_cast<ExitStatus>(failure.status), patience);
    if (!alone) sleep_for(turn);
    errors_ << "tranche: " << failure.text << advice << std::endl;
    // Lets a peer report its position. If the ranks may all have this error, none should have time to repeat
    // it.
    sleep_for((alone ? 0.5 : 0.15) * patience);
  } else {
    const bool speaks =
        own_rank == 0 || (own_rank == 1 && cause.find(mesh.name_of_rank(0) + " failed") != std::string::npos);
    if (speaks) errors_ << "tranche: " << failure.text << std::endl;
    // The rank that failed ends the job with its own status; if it cannot, this rank does.
    sleep_for(patience);
  }
  communicator.abort_job(failure.status);
  return failure.status;
}

}  // namespace tranche::tools
