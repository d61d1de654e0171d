#pragma once
/// The start and the end of a job: the values that ranks compare before there is a Runtime, and the handling
/// of a failure on any rank.

#include <cstdint>
#include <exception>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "tools/arguments.h"
#include "tranche/comm/communicator.h"

namespace tranche {
class Runtime;
}

namespace tranche::tools {

/// Exit status of a disk failure outside of checkpoints (swap files of the nvme tier, a report at the end);
/// it extends core/error.h.
inline constexpr int storage_failed = 8;
/// Exit status of a run or a study that a signal stopped before its end; its results so far are saved.
inline constexpr int stopped_by_signal = 9;

/// The message of an error, and the exit status of the program that ends with it.
struct Failure {
  std::string text;  ///< Error::what(), with rank and position
  int status = 1;
  bool echo = false;  ///< a peer's failure, which that peer reports itself
};
Failure describe(const std::exception_ptr& error);

/// The ranks of a job before there is a configuration.
class Launch {
 public:
  /// Under mpirun it uses the world, else one rank. `errors` receives messages for people. `flags` are
  /// compared as by require_same(): Options::flags.
  Launch(std::ostream& errors, const std::vector<Flag>& flags);
  /// For tests.
  Launch(std::unique_ptr<Communicator> world, std::ostream& errors);
  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  /// Ranks on this rank's node.
  int local_size() const { return world_->local_size(); }

  /// Requires `value` to be the same on all ranks: agree() refuses the first one that is not, in the order of
  /// these calls. `name` is for people and may differ ("the digest of data file 'a.txt'"), `advice` contains
  /// the remedy.
  void require_same(std::string name, std::string value, std::string advice);
  /// Collective. Runs work on every rank and waits for all. If it threw anywhere, the lowest such rank prints
  /// its error and every rank returns the highest status, so that all can end in order. If not, but a value
  /// of require_same() differs from rank 0's, the lowest such rank names it with both values, and the status
  /// is 2. 0 when there is no error.
  int agree(const std::function<void()>& work);
  /// Collective. Returns rank 0's number on every rank.
  std::int64_t broadcast_from_root(std::int64_t value);
  /// Collective. Returns the least of all ranks' numbers.
  std::int64_t least(std::int64_t value);
  std::string broadcast_from_root(std::string text);

  /// Ends the job because of `error` on this rank: posts the cause to the peers, prints it, waits `patience`
  /// seconds for peers to end it first, and aborts the job with the status. If all ranks have the same error,
  /// only rank 0 prints it. A peer's failure is printed by that peer; among the ranks that only received it,
  /// the lowest remaining one reports it. A failure without a status of its own ends a job of several ranks
  /// with status 5. `advice` is printed below this rank's own error. `runtime`: the job's, if it exists; its
  /// mesh names the rank. Returns the status if the job was not aborted (one rank).
  int fail(const std::exception_ptr& error, double patience = 2, const std::string& advice = {},
           Runtime* runtime = nullptr);

 private:
  struct Common {
    std::string name, value, advice;
  };
  /// Collective. Prints the failure of the lowest rank that has one; returns the highest status of all. Sets
  /// `same` to whether all ranks gave the same `digest`.
  int meet(const Failure& failure, std::uint64_t digest, bool& same);
  /// Collective. Describes the first value that differs from rank 0's; empty if none does.
  std::string difference_to_first();
  std::unique_ptr<Communicator> world_;
  std::ostream& errors_;
  std::vector<Common> common_;
};

}  // namespace tranche::tools
