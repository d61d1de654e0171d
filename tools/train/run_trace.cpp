#include "tools/train/run_trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/output_file.h"

namespace tranche::tools {

namespace {

/// Round-trip messages with each rank; the fastest counts.
constexpr int round_trips = 32;
/// The bytes of a trace in one message.
constexpr std::int64_t piece_bytes = std::int64_t{1} << 20;

const OperationLabel label{"trace", "report", Traffic::control, Tier::host};

void send(Communicator& ranks, const void* values, std::int64_t count, DataType dtype, int peer) {
  ranks.send(values, count, dtype, peer, {}, label).wait();
}

void receive(Communicator& ranks, void* values, std::int64_t count, DataType dtype, int peer) {
  ranks.recv(values, count, dtype, peer, {}, label).wait();
}

/// Interpolates the clock difference between two comparisons; outside of them it uses the nearer one.
class Shift {
 public:
  Shift(const ClockDifference& first, const ClockDifference& last) : first_(first), last_(last) {}
  double operator()(double time) const {
    if (!(last_.at > first_.at)) return -last_.ahead;
    const double share = std::clamp((time - first_.at) / (last_.at - first_.at), 0.0, 1.0);
    return -(first_.ahead + share * (last_.ahead - first_.ahead));
  }

 private:
  ClockDifference first_, last_;
};

/// "850 ns", "12.3 us", "4 ms".
std::string short_time(double seconds) {
  if (seconds < 1e-6) return fmt::format("{:.3g} ns", seconds * 1e9);
  return seconds < 1e-3 ? fmt::format("{:.3g} us", seconds * 1e6) : fmt::format("{:.3g} ms", seconds * 1e3);
}

/// "rank 3 (pipeline 1, shard 1)", with the coordinate even if there is only one axis.
std::string name_of(const Mesh& mesh, int rank) {
  if (mesh.describe(rank).empty()) {
    for (int a = 0; a < mesh_axes; ++a) {
      const auto axis = static_cast<MeshAxis>(a);
      if (mesh.size(axis) > 1) {
        return fmt::format("rank {} ({} {})", rank, tranche::name_of(axis), mesh.coordinate(axis, rank));
      }
    }
  }
  return mesh.name_of_rank(rank);
}

/// Stages of a data rank follow each other, and within a stage the ranks of the axes `context` and `tensor`.
int position_of(const Mesh& mesh, int rank) {
  const int stage =
      mesh.data_rank(rank) * mesh.size(MeshAxis::pipeline) + mesh.coordinate(MeshAxis::pipeline, rank);
  const int part = stage * mesh.size(MeshAxis::context) + mesh.coordinate(MeshAxis::context, rank);
  return part * mesh.size(MeshAxis::tensor) + mesh.coordinate(MeshAxis::tensor, rank);
}

}  // namespace

ClockDifference compare_clocks(Communicator& ranks, const std::function<double()>& clock) {
  double there = 0;
  if (ranks.rank() > 0) {
    for (int trip = 0; trip < round_trips; ++trip) {
      receive(ranks, &there, 1, DataType::float64, 0);
      const double now = clock();
      send(ranks, &now, 1, DataType::float64, 0);
    }
    double found[3] = {};
    receive(ranks, found, 3, DataType::float64, 0);
    return {found[0], found[1], found[2]};
  }
  for (int peer = 1; peer < ranks.size(); ++peer) {
    ClockDifference best{0, 0, std::numeric_limits<double>::infinity()};
    for (int trip = 0; trip < round_trips; ++trip) {
      const double sent = clock();
      send(ranks, &sent, 1, DataType::float64, peer);
      receive(ranks, &there, 1, DataType::float64, peer);
      const double back = clock(), error = (back - sent) / 2;
      if (error < best.error) best = {there, there - (sent + back) / 2, error};
    }
    const double found[3] = {best.at, best.ahead, best.error};
    send(ranks, found, 3, DataType::float64, peer);
  }
  return {clock(), 0, 0};
}

RunTrace::RunTrace(const TraceRecorder& trace, Communicator& ranks, const Mesh& mesh,
                   std::function<double()> clock)
    : trace_(trace),
      ranks_(ranks),
      mesh_(mesh),
      clock_(clock ? std::move(clock) : std::function<double()>(detail::seconds_now)),
      first_(compare_clocks(ranks, clock_)) {}

std::string RunTrace::save(const std::string& path) {
  const ClockDifference last = compare_clocks(ranks_, clock_);
  const int rank = ranks_.rank(), world = ranks_.size();
  std::vector<double> errors(static_cast<std::size_t>(world));
  errors[static_cast<std::size_t>(rank)] = std::max(first_.error, last.error);
  ranks_.all_reduce(errors.data(), world, DataType::float64, ReduceOperation::sum, label).wait();
  const std::string own = trace_.entries(name_of(mesh_, rank), position_of(mesh_, rank), Shift(first_, last));
  if (rank > 0) {
    const auto bytes = static_cast<std::int64_t>(own.size());
    send(ranks_, &bytes, 1, DataType::int64, 0);
    for (std::int64_t at = 0; at < bytes; at += piece_bytes) {
      send(ranks_, own.data() + at, std::min(piece_bytes, bytes - at), DataType::uint8, 0);
    }
    return {};
  }
  // The clocks of two ranks differ by at most the sum of their errors.
  std::sort(errors.begin(), errors.end());
  const double error = errors[errors.size() - 1] + (world > 1 ? errors[errors.size() - 2] : 0);
  detail::OutputFile file(path);
  file.write(fmt::format(
      R"({{"displayTimeUnit":"ms","otherData":{{"ranks":"{}","clock_error_microseconds":"{:.3f}"}},)"
      "\n"
      R"("traceEvents":[)"
      "\n",
      world, error * 1e6));
  file.write(own);
  std::vector<char> piece;
  for (int peer = 1; peer < world; ++peer) {
    std::int64_t bytes = 0;
    receive(ranks_, &bytes, 1, DataType::int64, peer);
    file.write(",\n");
    for (std::int64_t at = 0; at < bytes; at += piece_bytes) {
      piece.resize(static_cast<std::size_t>(std::min(piece_bytes, bytes - at)));
      receive(ranks_, piece.data(), static_cast<std::int64_t>(piece.size()), DataType::uint8, peer);
      file.write({piece.data(), piece.size()});
    }
  }
  file.write("\n]}\n");
  file.commit();
  return fmt::format("trace: {}, of {} ranks, whose clocks agree within {}\n", path, world,
                     short_time(error));
}

}  // namespace tranche::tools
