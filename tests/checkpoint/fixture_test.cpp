// fixtures/version-1 was written by the first release of the format and is never written again: every later
// one reads it.

#include <gmock/gmock.h>

#include "checkpoint/reader.h"
#include "sample.h"

namespace tranche::checkpoint {
namespace {

using namespace tranche::testing;

TEST(CheckpointFixture, TheFirstVersionIsReadForEver) {
  const TestStorage storage(detail::posix_file_system());
  std::vector<std::string> notes;
  const Listed newest = newest_checkpoint(detail::posix_file_system(), TRANCHE_FIXTURES "/version-1", notes);
  EXPECT_THAT(notes, ::testing::IsEmpty());
  Reader reader(storage, newest.path);
  EXPECT_THAT(reader.verify(), ::testing::IsEmpty());
  const Manifest& manifest = reader.manifest();
  EXPECT_EQ(manifest.version, 1);
  EXPECT_EQ(manifest.layout, sample_layout(3));
  EXPECT_EQ(manifest.stage, 2);
  EXPECT_EQ(manifest.numerics, "cpu test");
  RunState run = manifest.run;
  EXPECT_EQ(run.user, R"({"note":"café"})");
  run.user = sample_run(7).user;
  EXPECT_EQ(run, sample_run(7));
  for (const StoredTensor& tensor : reader.tensors()) {
    std::vector<float> values(static_cast<std::size_t>(tensor.shape.elements()));
    for (const std::string& kind : reader.kinds(tensor)) {
      reader.read_tensor(tensor.name, kind, {0, tensor.shape.elements()}, DataType::float32, values.data());
      for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(values[i],
                  sample_value(kind, tensor.name, static_cast<std::int64_t>(i), reader.dtype(tensor, kind)))
            << kind << " of " << tensor.name << " element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace tranche::checkpoint
