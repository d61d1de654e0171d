#pragma once
/// The communicator of host memory: turns calls into operations of a progress engine. Private to comm/.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/call_signature.h"
#include "comm/communicator_base.h"
#include "comm/node/window_algorithms.h"
#include "comm/peer_inquiry.h"
#include "comm/transport/progress_engine.h"

namespace tranche::comm {

class GroupCommunicator : public CommunicatorBase, public PeerInquiry {
 public:
  /// `members`: job ranks in group order. `context` distinguishes its messages from those of other groups.
  GroupCommunicator(std::shared_ptr<ProgressEngine> engine, std::vector<int> members, int context);
  /// Makes the group of all ranks of the engine's transport.
  static std::unique_ptr<Communicator> of_all(std::shared_ptr<ProgressEngine> engine);
  ~GroupCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(members_.size()); }
  std::string_view backend() const override { return engine_->transport().backend(); }
  int local_size() const override { return local_size_; }
  int local_rank() const override { return local_rank_; }
  int node_of(int rank) const override { return window_->layout().node(rank); }

  Event all_gather(const void* shard, void* full, std::int64_t count, DataType dtype,
                   std::int64_t bucket_elements, std::span<const Event> ready,
                   const OperationLabel& label) override;
  Event reduce_scatter(const void* full, DataType dtype, void* output, DataType output_dtype,
                       std::int64_t count, const ReductionOptions& options, std::span<const Event> ready,
                       const OperationLabel& label) override;
  std::int64_t summed_elements_sent(std::int64_t count, DataType dtype,
                                    const ReductionOptions& options) const override;
  Event all_reduce(void* values, std::int64_t count, DataType dtype, ReduceOperation operation,
                   const OperationLabel& label) override;
  Event all_to_all(const void* sent, void* received, std::int64_t count, DataType dtype,
                   std::span<const Event> ready, const OperationLabel& label) override;
  Event all_to_all_v(const void* sent, std::span<const RankElements> sends, void* received,
                     std::span<const RankElements> receives, DataType dtype, std::span<const Event> ready,
                     const OperationLabel& label) override;
  Event broadcast(void* values, std::int64_t count, DataType dtype, int root, std::span<const Event> ready,
                  const OperationLabel& label) override;
  Event send(const void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
             const OperationLabel& label) override;
  Event recv(void* values, std::int64_t count, DataType dtype, int peer, std::span<const Event> ready,
             const OperationLabel& label) override;
  Event barrier(const OperationLabel& label) override;
  std::unique_ptr<Communicator> split(int color, int key) override;

  void post_failure(std::string_view cause, ExitStatus status, double seconds) noexcept override {
    engine_->post_failure(cause, status, seconds);
  }
  void post_unwinding(std::string_view where, double seconds) noexcept override {
    engine_->post_failure(where, ExitStatus::communication, seconds, /*cause_follows=*/true);
  }
  void check_health() override { engine_->require_healthy({}); }
  void note_device_call(std::string_view name, std::string_view unit, std::uint64_t number) override {
    engine_->note_call(device_call(name, unit, number));
  }
  void ask_peers(std::string_view name, std::string_view unit, std::uint64_t number) noexcept override {
    std::vector<int> others = members_;
    std::erase(others, engine_->transport().rank());
    engine_->tell_peers(device_call(name, unit, number), std::move(others));
  }
  void abort_job(int status) noexcept override { engine_->abort_job(status); }

 private:
  /// The bytes of one exchange with one member, in local memory.
  struct Part {
    int member;
    void* data;
    std::int64_t bytes;
  };
  /// The signature of a device call. Device calls are numbered separately.
  CallSignature device_call(std::string_view name, std::string_view unit, std::uint64_t number) const {
    Tag tag;
    tag.context = context_ | 1 << 20;
    tag.sequence = number;
    return make_call_signature(engine_->transport().rank(), tag, 0, name, unit);
  }
  OperationInfo open(std::string_view name, std::span<const Event> ready, const OperationLabel& label);
  Event move(OperationInfo info, std::function<void()> local, const std::vector<Part>& sends,
             const std::vector<Part>& receives, std::int64_t message_bytes);
  /// The other members, in cyclic order after this rank, so that the ranks do not all begin with the same
  /// peer.
  std::vector<int> peers() const;
  Event gather(OperationInfo info, const void* shard, void* full, std::int64_t bytes,
               std::int64_t message_bytes);

  std::shared_ptr<ProgressEngine> engine_;
  std::vector<int> members_;
  int context_;
  int rank_ = 0, local_size_ = 0, local_rank_ = 0;
  std::unique_ptr<const WindowAlgorithms> window_;
  int exceptions_ = 0;  ///< exceptions in flight at construction; more at destruction means unwinding
  std::uint64_t sequence_ = 0;
  std::vector<std::uint64_t> sends_, receives_;  ///< the number of the next message, by member
};

}  // namespace tranche::comm
