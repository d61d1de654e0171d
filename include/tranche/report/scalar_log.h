#pragma once
/// Curves of a run for viewers: TensorBoard's event files, and CSV.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace tranche {

/// A point of the curve `tag` ("Train/Samples/train_loss").
struct Scalar {
  std::string tag;
  double value = 0;
};

/// Log files that one process writes, usually rank 0. The points of add() are in the file when it returns.
class ScalarLog {
 public:
  virtual ~ScalarLog() = default;
  /// Adds points at `step`, any increasing count: steps, samples or tokens. Throws IoError.
  virtual void add(std::int64_t step, std::span<const Scalar> scalars) = 0;
};

/// TensorBoard's event file in `folder`, which is created. A run in another run's folder, or one that
/// continues from `last_step`, adds a file, after which TensorBoard drops the earlier files' points beyond
/// that step. Values are fp32. Format: records of TensorFlow's TFRecord with Event messages. Throws IoError.
std::unique_ptr<ScalarLog> make_tensorboard_log(const std::string& folder, std::int64_t last_step = 0);

/// One file per tag in `folder`, which is created, with the names of DeepSpeed's csv_monitor: '/' and blanks
/// become '_'. Its first row is "step" and the part of the tag after the last '/'. A run that continues from
/// `last_step` in the same folder appends to the files, and rows beyond that step are removed; `say` receives
/// a line for people about each file that had some. Throws IoError, and ConfigurationError when a new run
/// finds CSV files in the folder, or when another log, which locks it (flock), writes there.
std::unique_ptr<ScalarLog> make_csv_log(const std::string& folder, std::int64_t last_step = 0,
                                        std::function<void(const std::string&)> say = {});

}  // namespace tranche
