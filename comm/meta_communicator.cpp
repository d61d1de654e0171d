#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "comm/communicator_base.h"
#include "comm/deterministic_sum.h"
#include "comm/node/node_layout.h"
#include "comm/node/reduce_plan.h"
#include "comm/node/staging_buffer.h"
#include "comm/node/window_policy.h"
#include "device/work_recorder.h"
#include "tranche/comm/backends.h"
#include "tranche/core/error.h"
#include "tranche/device/device.h"

namespace tranche {

namespace {

/// Checks, counts and hashes like the real communicators; it moves nothing and accesses no buffer.
class MetaCommunicator : public comm::CommunicatorBase {
 public:
  /// `nodes`: the node of each rank. `members`: the number of each rank in the whole run.
  MetaCommunicator(int rank, std::vector<int> nodes, std::vector<int> members, NodeCollectives collectives,
                   std::shared_ptr<comm::StagingBuffer> staging,
                   std::shared_ptr<detail::WorkRecorder> recorder)
      : rank_(rank),
        size_(static_cast<int>(nodes.size())),
        nodes_(std::move(nodes)),
        members_(std::make_shared<const std::vector<int>>(std::move(members))),
        collectives_(collectives),
        layout_(nodes_),
        staging_(std::move(staging)),
        recorder_(std::move(recorder)) {
    std::map<int, int> ranks_of;
    count_crossings(std::make_unique<const comm::Crossings>(layout_, rank_, collectives_, true));
    for (const int node : nodes_) most_on_node_ = std::max(most_on_node_, ++ranks_of[node]);
    // Each rank of a node begins an operation when it is ready; a device has one stream for all its
    // operations.
    if (!recorder_) return;
    lane_ = recorder_->add_lane("communication", !recorder_->inline_compute());
    alone_->set_recorder(recorder_.get(),
                         recorder_->inline_compute() ? detail::WorkRecorder::host_lane : lane_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string_view backend() const override { return "meta"; }
  bool simulated() const override { return true; }
  int local_size() const override {
    return static_cast<int>(std::count(nodes_.begin(), nodes_.end(), node()));
  }
  int node_of(int rank) const override { return nodes_[static_cast<std::size_t>(rank)]; }
  int local_rank() const override {
    return static_cast<int>(std::count(nodes_.begin(), nodes_.begin() + rank_, node()));
  }

  Event all_gather(const void* shard, void* full, std::int64_t count, DataType dtype,
                   std::int64_t bucket_elements, std::span<const Event> ready,
                   const OperationLabel& label) override {
    validate_and_record_all_gather(shard, full, count, dtype, bucket_elements, label);
    return record("all_gather", count * size_, dtype, ready, label);
  }
  Event reduce_scatter(const void* full, DataType dtype, void* output, DataType output_dtype,
                       std::int64_t count, const ReductionOptions& options, std::span<const Event> ready,
                       const OperationLabel& label) override {
    validate_and_record_reduce_scatter(full, dtype, output, output_dtype, count, options, label);
    if (size_ == 1) {
      for (const Event& event : ready) alone_->wait(event);
      comm::deterministic_sum(*alone_, {&full, 1}, dtype, options,
                              TensorView{output, output_dtype, Shape{count}});
      return alone_->record();
    }
    return record("reduce_scatter", count * size_, dtype, ready, label);
  }
  /// The count is the same as GroupCommunicator's.
  std::int64_t summed_elements_sent(std::int64_t count, DataType dtype,
                                    const ReductionOptions& options) const override {
    if (layout_.nodes() == 1 || layout_.nodes() == size_) return 0;
    const std::int64_t width = tranche::size_of(dtype);
    if (!comm::goes_by_window(collectives_, (size_ - 1) * count * width, comm::least_summed_bytes)) return 0;
    auto& plan = plans_[{options.group_size, width}];
    if (!plan) plan = std::make_unique<comm::ReducePlan>(layout_, options.group_size, width);
    return plan->sums_sent(layout_, rank_) * count;
  }
  Event all_reduce(void* values, std::int64_t count, DataType dtype, ReduceOperation,
                   const OperationLabel& label) override {
    validate_and_record_all_reduce(values, count, dtype, label);
    return record("all_reduce", count, dtype, {}, label);
  }
  Event all_to_all(const void* sent, void* received, std::int64_t count, DataType dtype,
                   std::span<const Event> ready, const OperationLabel& label) override {
    validate_and_record_all_to_all(sent, received, count, dtype, label);
    return record("all_to_all", count * size_, dtype, ready, label);
  }
  Event all_to_all_v(const void* sent, std::span<const RankElements> sends, void* received,
                     std::span<const RankElements> receives, DataType dtype, std::span<const Event> ready,
                     const OperationLabel& label) override {
    validate_and_record_all_to_all_v(sent, sends, received, receives, dtype, label);
    // It is recorded with the duration of an all_to_all in which every pair exchanges this rank's mean.
    std::int64_t out = 0, in = 0;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      out += sends[static_cast<std::size_t>(r)].count;
      in += receives[static_cast<std::size_t>(r)].count;
    }
    return record("all_to_all", std::max(out, in) * size_ / std::max(1, size_ - 1), dtype, ready, label);
  }
  Event broadcast(void* values, std::int64_t count, DataType dtype, int root, std::span<const Event> ready,
                  const OperationLabel& label) override {
    validate_and_record_broadcast(values, count, dtype, root, label);
    return record("broadcast", count, dtype, ready, label);
  }
  Event send(const void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
             const OperationLabel& label) override {
    validate_and_record_send(values, count, dtype, peer, label);
    return record_message(detail::WorkKind::send, peer, count, dtype, ready, label);
  }
  Event recv(void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
             const OperationLabel& label) override {
    validate_and_record_recv(values, count, dtype, peer, label);
    return record_message(detail::WorkKind::receive, peer, count, dtype, ready, label);
  }
  Event barrier(const OperationLabel& label) override {
    validate_and_record_barrier(label);
    return record("barrier", 0, DataType::uint8, {}, label);
  }
  /// There are no peers to ask, so all ranks are assumed to pass this rank's colour and equal keys.
  std::unique_ptr<Communicator> split(int color, int) override {
    validate_and_record_split();
    if (color < 0) return nullptr;
    return std::make_unique<MetaCommunicator>(rank_, nodes_, *members_, collectives_, staging_, recorder_);
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> ranks) override {
    validate_and_record_split();
    std::vector<int> nodes, members;
    for (const int member : ranks) {
      nodes.push_back(nodes_.at(static_cast<std::size_t>(member)));
      members.push_back((*members_)[static_cast<std::size_t>(member)]);
    }
    const auto own = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
    return std::make_unique<MetaCommunicator>(own, std::move(nodes), std::move(members), collectives_,
                                              staging_, recorder_);
  }
  void post_failure(std::string_view, ExitStatus, double) noexcept override {}
  void post_unwinding(std::string_view, double) noexcept override {}
  void abort_job(int) noexcept override {}

 private:
  Event record(const char* operation, std::int64_t elements, DataType dtype, std::span<const Event> ready,
               const OperationLabel& label) {
    if (!recorder_) return {};
    detail::RecordedWork work;
    work.kind = detail::WorkKind::collective;
    work.name = operation;
    work.detail = label.unit;
    work.dtype = dtype;
    work.full_bytes = static_cast<double>(elements * size_of(dtype));
    work.ranks = size_;
    work.ranks_on_node = most_on_node_;
    work.members = members_;
    return recorder_->add(lane_, std::move(work), ready);
  }
  /// Messages of each neighbour and direction have a lane of their own, in which they pass in order.
  Event record_message(detail::WorkKind kind, int peer, std::int64_t elements, DataType dtype,
                       std::span<const Event> ready, const OperationLabel& label) {
    if (!recorder_) return {};
    const bool sends = kind == detail::WorkKind::send;
    auto [channel, is_new] = channels_.try_emplace({peer, sends});
    if (is_new) {
      const int rank = (*members_)[static_cast<std::size_t>(peer)];
      channel->second.lane = recorder_->add_lane(fmt::format("{} rank {}", sends ? "to" : "from", rank));
      channel->second.rank = std::make_shared<const std::vector<int>>(1, rank);
    }
    detail::RecordedWork work;
    work.kind = kind;
    work.name = sends ? "send" : "receive";
    work.detail = label.unit;
    work.dtype = dtype;
    work.full_bytes = static_cast<double>(elements * size_of(dtype));
    work.ranks = 2;
    work.ranks_on_node = most_on_node_;
    work.members = channel->second.rank;
    return recorder_->add(channel->second.lane, std::move(work), ready);
  }

  int node() const { return nodes_[static_cast<std::size_t>(rank_)]; }

  struct Channel {
    int lane = 0;
    std::shared_ptr<const std::vector<int>> rank;
  };

  int rank_, size_, most_on_node_ = 0;
  std::vector<int> nodes_;
  std::shared_ptr<const std::vector<int>> members_;
  std::map<std::pair<int, bool>, Channel> channels_;  ///< by peer and direction; true: to it
  NodeCollectives collectives_;
  comm::NodeLayout layout_;
  mutable std::map<std::pair<int, std::int64_t>, std::unique_ptr<comm::ReducePlan>> plans_;
  std::shared_ptr<comm::StagingBuffer> staging_;  // tracked like the real one, never accessed
  std::shared_ptr<detail::WorkRecorder> recorder_;
  int lane_ = 0;
  std::unique_ptr<Device> device_ = make_device({.kind = DeviceKind::meta});
  /// The stream for the sums of a group of one rank.
  std::unique_ptr<Stream> alone_ = device_->create_inline_stream("communication", 1);
};

}  // namespace

std::unique_ptr<Communicator> make_meta_communicator(int rank, int size, int local_size,
                                                     const CommunicatorOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw InvalidArgument(fmt::format("meta rank {} of {}", rank, size));
  }
  if (options.local_size > 0) local_size = options.local_size;
  if (local_size <= 0) local_size = size;
  // Without a resource no ledger counts the memory, so none is allocated.
  const bool tracked = options.memory != nullptr;
  std::vector<int> nodes, members;
  for (int member = 0; member < size; ++member) {
    nodes.push_back(member / local_size);
    members.push_back(member);
  }
  return std::make_unique<MetaCommunicator>(
      rank, std::move(nodes), std::move(members), options.collectives,
      std::make_shared<comm::StagingBuffer>(options.memory, options.staging_bytes, tracked ? size : 1),
      options.recorder);
}

}  // namespace tranche
