#pragma once
/// The start and the end of a job: what ranks agree on before there is a Runtime, and how a failure ends all.

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

/// Exit status where a disk fails under what is no checkpoint: swap files of the nvme tier, a report at the
/// end; beside those of core/error.h.
inline constexpr int storage_failed = 8;
/// Exit status of a run or a study that a signal stopped before its end: what it had done is saved.
inline constexpr int stopped_by_signal = 9;

/// The message of an error, and the exit status of the program that ends with it.
struct Failure {
  std::string text;  ///< Error::what(), with rank and position
  int status = 1;
  bool echo = false;  ///< a peer's failure, which that peer tells itself
};
Failure describe(const std::exception_ptr& error);

/// Ranks before there is a configuration.
class Launch {
 public:
  /// Under mpirun the world, else one rank. `errors` gets what people should read. `flags` are compared as
  /// require_same() has it: Options::flags.
  Launch(std::ostream& errors, const std::vector<Flag>& flags);
  /// For tests.
  Launch(std::unique_ptr<Communicator> world, std::ostream& errors);
  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }

  /// `value` has to be the same on all ranks: agree() refuses the first one that is not, in the order of
  /// these calls. `name` is for people and may differ ("the digest of data file 'a.txt'"), `advice` says what
  /// to do.
  void require_same(std::string name, std::string value, std::string advice);
  /// Collective. Runs work on every rank and waits for all; when it threw anywhere, the lowest such rank
  /// prints its error and every rank returns the highest status, so that all can leave in order. Where it
  /// threw nowhere, but a value of require_same() is not rank 0's, the lowest such rank names it with both
  /// values, and the status is 2. 0 when all is well.
  int agree(const std::function<void()>& work);
  /// Collective. Returns rank 0's number on every rank.
  std::int64_t broadcast_from_root(std::int64_t value);
  std::string broadcast_from_root(std::string text);

  /// Ends the job because of `error` on this rank: posts the cause to the peers, prints it, gives peers
  /// `patience` seconds in which theirs may end it first, and aborts the job with the status. Of an error
  /// that all ranks meet at once only rank 0's is printed; of a peer's failure, which that peer prints, only
  /// the report of the lowest rank that is left. A failure without a status of its own ends a job of several
  /// ranks with status 5. `advice` is printed below this rank's own error. Returns the status (one rank, or
  /// no abort). `runtime`: the job's once there is one; its mesh names the rank.
  int fail(const std::exception_ptr& error, double patience = 2, const std::string& advice = {},
           Runtime* runtime = nullptr);

 private:
  struct Common {
    std::string name, value, advice;
  };
  /// Collective. Prints the failure of the lowest rank that has one; the highest status of all. Sets `same`:
  /// whether all ranks gave the same `digest`.
  int meet(const Failure& failure, std::uint64_t digest, bool& same);
  /// Collective. Says which value differs from rank 0's; empty where none does.
  std::string difference_to_first();
  std::unique_ptr<Communicator> world_;
  std::ostream& errors_;
  std::vector<Common> common_;
};

}  // namespace tranche::tools
