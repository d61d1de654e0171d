#pragma once
/// Options and results of Engine::save and Engine::load.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tranche/core/tensor_view.h"

namespace tranche {

/// An array of the program's own in a checkpoint: numbers of any dtype in host memory, of which save() takes
/// a copy. Every rank gives the same arrays in the same order.
struct SavedArray {
  std::string name;        ///< unique among arrays; parts between '/' neither empty nor "." nor ".."
  Shape shape;             ///< of the whole array, or of this rank's
  std::int64_t first = 0;  ///< the element of the whole array at which `values` begins
  ConstTensorView values;  ///< this rank's part
  bool partial = false;    ///< a part of an array of all ranks
  bool per_rank = false;   ///< this rank's own

  /// All ranks have it alike, bit for bit. Each stores its share.
  static SavedArray whole(std::string name, ConstTensorView values) {
    return {std::move(name), values.shape, 0, values, false, false};
  }
  /// This rank's part of an array of all ranks. Parts follow each other in the order of ranks, without gaps;
  /// some may be empty. Ranks may give the same part, alike bit for bit: each stores a share of it.
  static SavedArray part(std::string name, Shape whole, std::int64_t first, ConstTensorView values) {
    return {std::move(name), whole, first, values, true, false};
  }
  /// An array of this rank alone; shapes may differ between ranks. Given back to as many ranks only.
  static SavedArray of_rank(std::string name, ConstTensorView values) {
    return {std::move(name), values.shape, 0, values, false, true};
  }
};

/// An array that a checkpoint holds.
struct ArrayInfo {
  std::string name;
  DataType dtype = DataType::float32;
  bool per_rank = false;
  Shape shape;  ///< of one of each rank: this rank's; [0] where there was no such rank
};

/// Host memory for elements of an array: first, first + 1 ... as many as `values` has, in the array's dtype.
struct ArrayTarget {
  std::string name;
  TensorView values;
  std::int64_t first = 0;
};

struct SaveOptions {
  std::string user = "{}";  ///< the caller's own JSON object, at most 1 MiB; from rank 0
  /// Checkpoints that stay: the newest so many (0: all) ... Until a later step is taken, or an evaluation of
  /// the saved weights has a finite loss, the newest one before that is known to be good stays as well.
  int keep_last = 0;
  std::int64_t keep_every = 0;  ///< ... and those whose step is a multiple ...
  /// ... and the one whose `user` has the lowest number at this JSON pointer ("/loss"); empty: none.
  std::string keep_lowest = {};
  /// Return when the checkpoint is durable; else once this rank's shard is copied.
  bool wait = false;
  std::vector<SavedArray> arrays = {};
};

struct LoadOptions {
  /// Only weights: optimizer state, step and loss scale stay as they are.
  bool weights_only = false;
  /// For a folder of checkpoints whose newest complete one turns out to be damaged as it is read: takes the
  /// next older one, with a line in LoadResult::notes, until one is whole. Without it that is an error.
  bool pass_over_damaged = false;
  /// Takes optimizer state and weights that were saved in another format (tranche.moments, tranche.master),
  /// converted. Without it that is an error; with weights_only weights are taken in any format.
  bool convert_state = false;
  /// For a checkpoint of adapters alone (LoraConfig): where its base is, a checkpoint or a folder of them;
  /// empty: where it was.
  std::string base = {};
  /// Takes the tensors that checkpoint and model both have, with their optimizer state unless weights_only.
  /// Those that the checkpoint lacks keep weight and optimizer state (of a new engine: the initial ones),
  /// those that the model lacks are passed over; LoadResult::differences has a line for each. Another shape
  /// is refused all the same. Without it each difference is an error.
  bool partial = false;
  /// Names of the checkpoint's tensors and those that the model looks for instead, the first that fits
  /// counting. One `*` in the old name stands for any text, in the new one for the same. A rule that fits
  /// nothing is an error.
  std::vector<std::pair<std::string, std::string>> renames = {};
};

/// The state that was loaded, and how it differs from what was saved.
struct LoadResult {
  std::string folder;  ///< the checkpoint
  std::int64_t step = 0, applied_steps = 0, samples = 0, tokens = 0;
  int world = 1, stage = 0;       ///< of the run that saved
  std::string user = "{}";        ///< as SaveOptions had it
  std::vector<ArrayInfo> arrays;  ///< the arrays that load_arrays() can read
  std::string config = "{}";      ///< the effective configuration of that run
  std::string optimizer;          ///< as Optimizer::describe() put it
  std::int64_t bytes_read = 0;    ///< by this rank
  /// On rank 0, names of the files that came with the weights (a tokenizer's, generation settings) and go
  /// into the checkpoints that this engine saves from here on.
  std::vector<std::string> companions;
  std::vector<std::string> differences;  ///< a line for each tensor that is renamed, missing or passed over
  std::vector<std::string> notes;  ///< one line for each difference that changes bits or was passed over
};

}  // namespace tranche
