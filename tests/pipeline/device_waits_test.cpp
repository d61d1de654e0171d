// The waits of the streams of devices when every stage issues its schedule form no circle, whatever the
// numbers of stages and micro-batches. A step would hang where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "pipeline/schedule/schedule.h"

namespace tranche::pipeline {
namespace {

/// Points of a step and the points that each waits for.
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
  channels,   ///< each neighbour and direction has a stream of its own, as in comm/
  one_stream  ///< all messages of a stage in the order in which they are issued
};

/// The compute streams, the messages and the reductions over both ends of a step. A message is one point, as
/// with ncclSend and ncclRecv: it begins when both sides have come to it, and ends for both at once.
bool hangs(ScheduleKind kind, int stages, std::int64_t micro_batches, Order order) {
  Waits waits;
  std::vector<std::vector<Action>> lists;
  std::vector<std::vector<int>> computed;  // by stage and action: the compute stream has passed it
  for (int stage = 0; stage < stages; ++stage) {
    lists.push_back(actions_of(kind, stages, micro_batches, stage));
    computed.emplace_back();
    for (std::size_t i = 0; i < lists.back().size(); ++i) {
      computed.back().push_back(waits.point());
      if (i > 0) waits.wait(computed.back()[i], computed.back()[i - 1]);
    }
  }
  // The keys are sending stage, receiving stage and micro-batch.
  std::map<std::tuple<int, int, std::int64_t>, int> messages;
  std::map<std::int64_t, int> reductions;  // by micro-batch
  const auto message = [&](int from, int to, std::int64_t micro_batch) {
    const auto [at, fresh] = messages.try_emplace({from, to, micro_batch}, -1);
    if (fresh) at->second = waits.point();
    return at->second;
  };
  for (int stage = 0; stage < stages; ++stage) {
    const auto s = static_cast<std::size_t>(stage);
    std::map<int, int> last_of_channel;  // by stream
    for (std::size_t i = 0; i < lists[s].size(); ++i) {
      const Action& action = lists[s][i];
      const bool sends = action.kind == ActionKind::send_residual || action.kind == ActionKind::send_gradient;
      const bool receives =
          action.kind == ActionKind::receive_residual || action.kind == ActionKind::receive_gradient;
      const bool behind =
          action.kind == ActionKind::send_residual || action.kind == ActionKind::receive_gradient;
      const auto next_waits_for = [&](int point) {  // memory that is free behind the point is taken at once
        if (i + 1 < lists[s].size()) waits.wait(computed[s][i + 1], point);
      };
      if (sends || receives) {
        const int peer = behind ? stage + 1 : stage - 1;
        const int crossing =
            sends ? message(stage, peer, action.micro_batch) : message(peer, stage, action.micro_batch);
        if (i > 0) waits.wait(crossing, computed[s][i - 1]);  // what is sent is there, the memory is free
        const int stream = order == Order::one_stream ? 0 : 2 * (behind ? 1 : 0) + (sends ? 1 : 0);
        if (const auto before = last_of_channel.find(stream); before != last_of_channel.end())
          waits.wait(crossing, before->second);
        last_of_channel[stream] = crossing;
        if (receives) waits.wait(computed[s][i], crossing);
        if (action.kind == ActionKind::send_gradient) next_waits_for(crossing);
      }
      if (action.kind == ActionKind::backward && stage + 1 < stages)
        next_waits_for(message(stage, stage + 1, action.micro_batch));
      // The tied tensors' gradients, at the end of the micro-batch.
      const bool ends = (stage == 0 && action.kind == ActionKind::backward) ||
                        (stage + 1 == stages && action.kind == ActionKind::send_gradient);
      if (!ends) continue;
      const auto [at, fresh] = reductions.try_emplace(action.micro_batch, -1);
      if (fresh) at->second = waits.point();
      waits.wait(at->second, computed[s][i]);
      if (at != reductions.begin()) waits.wait(at->second, std::prev(at)->second);
      next_waits_for(at->second);
    }
  }
  return waits.has_circle();
}

/// Returns whether the hosts of ranks that share memory wait in a circle: the host that receives waits until
/// the sender's host has issued the message, and the hosts of both ends meet to issue a reduction.
bool hosts_hang(ScheduleKind kind, int stages, std::int64_t micro_batches) {
  Waits waits;
  std::map<std::tuple<int, ActionKind, std::int64_t>, int> issued;
  std::vector<std::vector<Action>> lists;
  for (int stage = 0; stage < stages; ++stage) {
    lists.push_back(actions_of(kind, stages, micro_batches, stage));
    for (const Action& action : lists.back())
      issued[{stage, action.kind, action.micro_batch}] = waits.point();
  }
  std::map<std::int64_t, int> meetings;
  for (int stage = 0; stage < stages; ++stage) {
    std::optional<int> before;
    for (const Action& action : lists[static_cast<std::size_t>(stage)]) {
      const std::int64_t m = action.micro_batch;
      const int here = issued[{stage, action.kind, m}];
      if (before) waits.wait(here, *before);
      before = here;
      if (action.kind == ActionKind::receive_residual)
        waits.wait(here, issued.at({stage - 1, ActionKind::send_residual, m}));
      if (action.kind == ActionKind::receive_gradient)
        waits.wait(here, issued.at({stage + 1, ActionKind::send_gradient, m}));
      if ((stage == 0 && action.kind == ActionKind::backward) ||
          (stage + 1 == stages && action.kind == ActionKind::send_gradient)) {
        const auto [at, fresh] = meetings.try_emplace(m, -1);
        if (fresh) at->second = waits.point();
        waits.wait(at->second, here);
        before = at->second;
      }
    }
  }
  return waits.has_circle();
}

TEST(DeviceWaits, HaveNoCircle) {
  for (const ScheduleKind kind : {ScheduleKind::afab, ScheduleKind::one_f_one_b}) {
    for (int stages = 2; stages <= 9; ++stages) {
      for (const std::int64_t micro_batches : {1, 2, 3, 4, 7, 8, 9, 17}) {
        EXPECT_FALSE(hangs(kind, stages, micro_batches, Order::channels))
            << name_of(kind) << ", " << stages << " stages, " << micro_batches << " micro-batches";
        EXPECT_FALSE(hosts_hang(kind, stages, micro_batches))
            << name_of(kind) << ", " << stages << " stages, " << micro_batches << " micro-batches";
      }
    }
  }
}

// Why each neighbour and direction has a stream of its own.
TEST(DeviceWaits, HaveACircleWhereAllMessagesShareAStream) {
  EXPECT_TRUE(hangs(ScheduleKind::one_f_one_b, 2, 4, Order::one_stream));
  EXPECT_TRUE(hangs(ScheduleKind::one_f_one_b, 4, 8, Order::one_stream));
  EXPECT_FALSE(hangs(ScheduleKind::afab, 4, 8, Order::one_stream));
}

}  // namespace
}  // namespace tranche::pipeline
