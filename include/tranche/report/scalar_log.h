#pragma once
/// Curves of a run for other programs' viewers: TensorBoard's event files, and CSV.

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tranche {

/// A point of the curve `tag` ("Train/Samples/train_loss").
struct Scalar {
  std::string tag;
  double value = 0;
};

/// Files that one process writes, on rank 0 as a rule. What add() was given is in the file when it returns.
class ScalarLog {
 public:
  virtual ~ScalarLog() = default;
  /// Points at `step`, which may be any count that grows: steps, samples or tokens. Throws IoError.
  virtual void add(std::int64_t step, std::span<const Scalar> scalars) = 0;
};

/// TensorBoard's event file in `folder`, which is made. A run in the folder of another one, or that goes on
/// from `last_step`, adds a file, by which TensorBoard drops the earlier files' points behind that step.
/// Values are fp32. Format: records of TensorFlow's TFRecord with Event messages. Throws IoError.
std::unique_ptr<ScalarLog> make_tensorboard_log(const std::string& folder, std::int64_t last_step = 0);

/// A file a tag in `folder`, which is made, named as DeepSpeed's csv_monitor names it: '/' and blanks become
/// '_'. Its first row is "step" and what follows the tag's last '/'. A run that goes on from `last_step` in
/// the same folder adds to the files, and rows behind that step go. Throws IoError, and ConfigurationError
/// when a run that begins finds CSV files in the folder.
std::unique_ptr<ScalarLog> make_csv_log(const std::string& folder, std::int64_t last_step = 0);

}  // namespace tranche
