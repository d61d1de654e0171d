#include "device/work_recorder.h"

#include <algorithm>
#include <utility>

namespace tranche::detail {

std::string_view name_of(WorkKind kind) {
  switch (kind) {
    case WorkKind::kernel:
      return "kernel";
    case WorkKind::copy_to_host:
      return "copy to host";
    case WorkKind::copy_from_host:
      return "copy from host";
    case WorkKind::collective:
      return "collective";
    case WorkKind::disk_read:
      return "disk read";
    case WorkKind::disk_write:
      return "disk write";
    case WorkKind::join:
      return "join";
    case WorkKind::mark:
      return "mark";
  }
  return "unknown";
}

class WorkRecorder::Point : public EventState {
 public:
  Point(std::shared_ptr<WorkRecorder> recorder, int index) : recorder_(std::move(recorder)), index_(index) {}
  bool query() override { return recorder_->passed_[static_cast<std::size_t>(index_)]; }
  // Nothing runs, so nothing blocks; the host's wait is only recorded.
  bool wait(double) override {
    recorder_->host_wait(index_);
    return true;
  }
  const WorkRecorder* recorder() const { return recorder_.get(); }
  int index() const { return index_; }

 private:
  std::shared_ptr<WorkRecorder> recorder_;
  int index_;
};

std::shared_ptr<WorkRecorder> WorkRecorder::make(bool inline_compute) {
  return std::shared_ptr<WorkRecorder>(new WorkRecorder(inline_compute));
}

WorkRecorder::WorkRecorder(bool inline_compute) : inline_compute_(inline_compute) {
  add_lane("host");
}

int WorkRecorder::add_lane(std::string name, bool ordered) {
  lanes_.push_back({std::move(name), ordered});
  last_.push_back(-1);
  waiting_.emplace_back();
  return static_cast<int>(lanes_.size()) - 1;
}

int WorkRecorder::index_of(const Event& event) const {
  const auto* point = dynamic_cast<const Point*>(event.state().get());
  return point != nullptr && point->recorder() == this ? point->index() : -1;
}

Event WorkRecorder::event_of(int index) {
  if (index < 0) return {};
  return Event(std::make_shared<Point>(shared_from_this(), index));
}

// Work that the host knows to be done implies that all its dependencies are done.
void WorkRecorder::pass(int index) {
  std::vector<int> open{index};
  while (!open.empty()) {
    const auto at = static_cast<std::size_t>(open.back());
    open.pop_back();
    if (passed_[at]) continue;
    passed_[at] = true;
    open.insert(open.end(), work_[at].after.begin(), work_[at].after.end());
  }
}

int WorkRecorder::append(RecordedWork work) {
  const int index = static_cast<int>(work_.size());
  std::sort(work.after.begin(), work.after.end());
  work.after.erase(std::unique(work.after.begin(), work.after.end()), work.after.end());
  const int lane = work.lane;
  work_.push_back(std::move(work));
  passed_.push_back(false);
  last_[static_cast<std::size_t>(lane)] = index;
  if (lane == host_lane) pass(index);
  return index;
}

Event WorkRecorder::add(int lane, RecordedWork work, std::span<const Event> after) {
  const auto at = static_cast<std::size_t>(lane);
  work.lane = lane;
  work.after = std::exchange(waiting_[at], {});
  for (const Event& event : after) {
    if (const int index = index_of(event); index >= 0) work.after.push_back(index);
  }
  if (lanes_[at].ordered && last_[at] >= 0) work.after.push_back(last_[at]);
  if (lane != host_lane && last_[host_lane] >= 0) work.after.push_back(last_[host_lane]);
  return event_of(append(std::move(work)));
}

void WorkRecorder::wait(int lane, const Event& event) {
  const int index = index_of(event);
  if (index < 0) return;
  if (lane == host_lane) {
    host_wait(index);
  } else {
    waiting_[static_cast<std::size_t>(lane)].push_back(index);
  }
}

void WorkRecorder::host_wait(int index) {
  if (index == last_[host_lane] || passed_[static_cast<std::size_t>(index)]) return;
  RecordedWork work;
  work.after.push_back(index);
  if (last_[host_lane] >= 0) work.after.push_back(last_[host_lane]);
  append(std::move(work));
}

Event WorkRecorder::point(int lane) {
  const auto at = static_cast<std::size_t>(lane);
  if (!waiting_[at].empty()) return add(lane, {});
  return event_of(last_[at]);
}

void WorkRecorder::took(double seconds) {
  if (last_[host_lane] < 0) return;
  RecordedWork& work = work_[static_cast<std::size_t>(last_[host_lane])];
  if (work.kind == WorkKind::kernel && work.seconds == 0) work.seconds = seconds;
}

void WorkRecorder::mark(std::string name) {
  RecordedWork work;
  work.kind = WorkKind::mark;
  work.name = std::move(name);
  add(host_lane, std::move(work));
}

}  // namespace tranche::detail
