#include "comm/group_communicator.h"
#include "tranche/comm/backends.h"

namespace tranche {

namespace {

/// The transport of a single rank, which sends nothing.
class SelfTransport : public comm::Transport {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string_view backend() const override { return "self"; }
  int node_of(int) const override { return 0; }
  bool needs_polling() const override { return false; }
  void close(bool, double) noexcept override {}
  std::unique_ptr<comm::Message> send(const void*, std::int64_t, int, const comm::Tag&) override { refuse(); }
  std::unique_ptr<comm::Message> receive(void*, std::int64_t, int, const comm::Tag&) override { refuse(); }
  std::optional<comm::FailureReport> poll_failure() override { return std::nullopt; }
  bool post_failure(const comm::FailureReport&) override { return true; }
  void abort_job(int) noexcept override {}

 private:
  [[noreturn]] static void refuse() { throw LogicError("a message in a group of one rank"); }
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator(const CommunicatorOptions& options) {
  return comm::GroupCommunicator::of_all(std::make_shared<comm::ProgressEngine>(
      std::make_unique<SelfTransport>(), std::make_shared<comm::CommunicationThread>(), options));
}

}  // namespace tranche
