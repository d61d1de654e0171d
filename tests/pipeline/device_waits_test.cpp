// Checks that waits of device streams form no cycle when every stage issues its schedule, for all numbers of
// stages and micro-batches. With a cycle a step would hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/schedule/generators.h"
#include "pipeline/schedule/lower.h"
#include "pipeline/schedule/run_order.h"
#include "tests/core/rounds.h"

namespace tranche::pipeline {
namespace {

/// A graph of the points of a step. An edge leads from a point to each point for which it waits.
class Waits {
 public:
  int point() {
    waits_.emplace_back();
    return static_cast<int>(waits_.size()) - 1;
  }
  void wait(int point, int for_point) { waits_[static_cast<std::size_t>(point)].push_back(for_point); }
  bool has_circle() const {
    std::vector<int> open(waits_.size());
    std::vector<std::vector<int>> waiting(waits_.size());
    std::vector<int> free;
    for (std::size_t point = 0; point < waits_.size(); ++point) {
      open[point] = static_cast<int>(waits_[point].size());
      for (const int other : waits_[point])
        waiting[static_cast<std::size_t>(other)].push_back(static_cast<int>(point));
      if (open[point] == 0) free.push_back(static_cast<int>(point));
    }
    std::size_t passed = 0;
    for (; !free.empty(); ++passed) {
      const auto point = static_cast<std::size_t>(free.back());
      free.pop_back();
      for (const int other : waiting[point]) {
        if (--open[static_cast<std::size_t>(other)] == 0) free.push_back(other);
      }
    }
    return passed < waits_.size();
  }

 private:
  std::vector<std::vector<int>> waits_;
};

/// How messages are ordered on a stage's device.
enum class Order {
  channels,   ///< each other stage and direction has its own stream, as in comm/
  one_stream  ///< all messages of a stage, in the order of their issue
};
/// When the memory of a sent gradient may be reused.
enum class Memory {
  as_executed,  ///< as RunOrder specifies
  at_once,      ///< after the send, for every schedule
};

bool sends(const Action& action) {
  return action.kind == ActionKind::send_residual || action.kind == ActionKind::send_gradient;
}
/// A common name for both halves of a message: sending chunk, kind, micro-batch.
std::tuple<int, bool, std::int64_t> message_of(const Action& action) {
  const bool residual =
      action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_residual;
  return {action.chunk + (sends(action) ? 0 : residual ? -1 : 1), residual, action.micro_batch};
}

/// The compute streams, the messages and the reductions over both ends in a step. A message is one point, as
/// with ncclSend and ncclRecv: it begins when both sides have reached it, and ends for both at once. Memory
/// that is free after a point is allocated again at once. `host_waits`: the host of a rank waits for such
/// memory and issues nothing meanwhile, as on the CPU.
bool hangs(const PipelineSchedule& schedule, Order order, Memory memory = Memory::as_executed,
           bool host_waits = false) {
  Waits waits;
  std::vector<std::vector<int>> computed;  // by stage and action: the point after it on the compute stream
  for (const std::vector<Action>& actions : schedule.ranks) {
    computed.emplace_back();
    for (std::size_t i = 0; i < actions.size(); ++i) {
      computed.back().push_back(waits.point());
      if (i > 0) waits.wait(computed.back()[i], computed.back()[i - 1]);
    }
  }
  std::map<std::tuple<int, bool, std::int64_t>, int> messages;
  std::map<std::int64_t, int> reductions;  // by micro-batch
  const auto message = [&](const std::tuple<int, bool, std::int64_t>& name) {
    const auto [at, fresh] = messages.try_emplace(name, -1);
    if (fresh) at->second = waits.point();
    return at->second;
  };
  const bool several_chunks = schedule.chunks() > schedule.stages();
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const auto s = static_cast<std::size_t>(stage);
    const std::vector<Action>& actions = schedule.ranks[s];
    const RunOrder run = run_order(schedule, stage);
    std::map<int, int> last_of_channel;  // by stream
    std::vector<std::size_t> posted(schedule.ranks.size());
    std::vector<int> awaited, awaited_before;  // memory to wait for after this action and after the previous
                                               // one
    const auto issue = [&](const Action& action, std::size_t i) {
      const int crossing = message(message_of(action));
      if (i > 0) waits.wait(crossing, computed[s][i - 1]);  // the data to send exists, and the memory is free
      for (const int point : awaited_before) {
        if (host_waits) waits.wait(crossing, point);
      }
      const int stream =
          order == Order::one_stream ? 0 : 2 * peer_of(schedule, action) + (sends(action) ? 1 : 0);
      if (const auto before = last_of_channel.find(stream); before != last_of_channel.end())
        waits.wait(crossing, before->second);
      last_of_channel[stream] = crossing;
      return crossing;
    };
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const Action& action = actions[i];
      awaited_before = std::exchange(awaited, {});
      const auto next_waits_for = [&](int point) {
        awaited.push_back(point);
        if (i + 1 < actions.size()) waits.wait(computed[s][i + 1], point);
      };
      if (is_message(action.kind) && sends(action)) {
        const int crossing = issue(action, i);
        if (action.kind == ActionKind::send_gradient && (!several_chunks || memory == Memory::at_once))
          next_waits_for(crossing);
      } else if (is_message(action.kind)) {
        const auto peer = static_cast<std::size_t>(peer_of(schedule, action));
        const std::vector<Action>& incoming = run.incoming[peer];
        const auto place = std::find(incoming.begin(), incoming.end(), action) - incoming.begin();
        while (posted[peer] <= static_cast<std::size_t>(place)) issue(incoming[posted[peer]++], i);
        waits.wait(computed[s][i], message(message_of(action)));
      }
      for (const std::size_t sent : run.taken[i]) next_waits_for(message(message_of(actions[sent])));
      if ((action.kind == ActionKind::backward || action.kind == ActionKind::input_gradient) &&
          schedule.crosses(action.chunk))
        next_waits_for(message({action.chunk, true, action.micro_batch}));
      // The gradients of tied tensors, at the end of the micro-batch.
      const int first = schedule.rank_of_chunk.front(), last = schedule.rank_of_chunk.back();
      if (first == last || (stage != first && stage != last)) continue;
      for (const std::int64_t m : run.ends[i]) {
        const auto [at, fresh] = reductions.try_emplace(m, -1);
        if (fresh) at->second = waits.point();
        waits.wait(at->second, computed[s][i]);
        next_waits_for(at->second);
      }
    }
  }
  for (auto at = reductions.begin(); at != reductions.end(); ++at) {
    if (at != reductions.begin()) waits.wait(at->second, std::prev(at)->second);
  }
  return waits.has_circle();
}

/// Returns true if the hosts of ranks that share memory wait in a cycle: the receiving host waits until the
/// sender's host has issued the message, and the hosts of both ends meet to issue a reduction.
bool hosts_hang(const PipelineSchedule& schedule) {
  Waits waits;
  std::map<std::tuple<int, bool, std::int64_t>, int> issued;
  std::vector<std::vector<int>> points;
  for (const std::vector<Action>& actions : schedule.ranks) {
    points.emplace_back();
    for (const Action& action : actions) {
      points.back().push_back(waits.point());
      if (is_message(action.kind) && sends(action)) issued[message_of(action)] = points.back().back();
    }
  }
  std::map<std::int64_t, int> meetings;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const auto s = static_cast<std::size_t>(stage);
    const RunOrder run = run_order(schedule, stage);
    std::optional<int> before;
    for (std::size_t i = 0; i < schedule.ranks[s].size(); ++i) {
      const Action& action = schedule.ranks[s][i];
      const int here = points[s][i];
      if (before) waits.wait(here, *before);
      before = here;
      if (is_message(action.kind) && !sends(action)) waits.wait(here, issued.at(message_of(action)));
      const int first = schedule.rank_of_chunk.front(), last = schedule.rank_of_chunk.back();
      if (first == last || (stage != first && stage != last)) continue;
      for (const std::int64_t m : run.ends[i]) {
        const auto [at, fresh] = meetings.try_emplace(m, -1);
        if (fresh) at->second = waits.point();
        waits.wait(at->second, *before);
        before = at->second;
      }
    }
  }
  return waits.has_circle();
}

/// A schedule with its messages; it has no ranks if it does not support these numbers.
PipelineSchedule lowered(std::string_view name, int stages, std::int64_t micro_batches, int chunks = 0) {
  if (name == "interleaved" && micro_batches % stages != 0) return {};
  return with_messages(generate(name, stages, micro_batches, chunks));
}

TEST(DeviceWaits, HaveNoCircle) {
  int point = 0;
  for (const NamedSchedule& named : named_schedules()) {
    for (int stages = 2; stages <= 8; ++stages) {
      for (const std::int64_t micro_batches : {1, 2, 3, 4, 7, 8, 9, 17, 24}) {
        for (const int chunks : named.any_chunks ? std::vector{1, 2, 4} : std::vector{0}) {
          const PipelineSchedule schedule = lowered(named.name, stages, micro_batches, chunks);
          if (schedule.ranks.empty() || !test::swept(point++, 11)) continue;
          EXPECT_FALSE(hangs(schedule, Order::channels))
              << named.name << ", " << stages << " stages, " << micro_batches << " micro-batches, " << chunks;
          EXPECT_FALSE(hangs(schedule, Order::channels, Memory::as_executed, true))
              << named.name << ", " << stages << " stages, " << micro_batches << " micro-batches, " << chunks
              << ", hosts wait";
          EXPECT_FALSE(hosts_hang(schedule))
              << named.name << ", " << stages << " stages, " << micro_batches << " micro-batches, " << chunks;
        }
      }
    }
  }
}

// This shows why each other stage and direction has a stream of its own.
TEST(DeviceWaits, HaveACircleWhereAllMessagesShareAStream) {
  EXPECT_TRUE(hangs(lowered("1f1b", 2, 4), Order::one_stream));
  EXPECT_TRUE(hangs(lowered("1f1b", 4, 8), Order::one_stream));
  EXPECT_FALSE(hangs(lowered("afab", 4, 8), Order::one_stream));
}

// This shows why the memory of a gradient is reused only after a proof that it was received, if ranks have
// several chunks.
TEST(DeviceWaits, HaveACircleWhereMemoryOfGradientsIsTakenAtOnce) {
  bool any = false;
  for (const char* const name : {"interleaved", "zb-v", "breadth-first"}) {
    any = any || hangs(lowered(name, 4, 8), Order::channels, Memory::at_once);
  }
  EXPECT_TRUE(any);
}

}  // namespace
}  // namespace tranche::pipeline
