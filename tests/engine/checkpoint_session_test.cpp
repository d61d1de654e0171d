// Saves without an engine: one store loads what another saved with other ranks, and reports what the run
// adds.
#include "engine/checkpoint_session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/reader.h"
#include "engine/sections.h"
#include "engine/state_reader.h"
#include "rank_state.h"
#include "tests/core/error_text.h"
#include "tests/offload/test_folder.h"

namespace tranche::test {
namespace {

using detail::CheckpointSession;
using detail::posix_file_system;
using ::testing::HasSubstr;

Config momentum_config(int stage) {
  Config config = plain_config(stage);
  config.optimizer.parameters["momentum"] = 0.5;
  return config;
}

// Three ranks of stage 2 save, and two ranks of stage 3 load: the digests of weights and optimizer state are
// equal.
TEST(CheckpointSession, AnotherStoreReadsWhatOneSaved) {
  const testing::TestFolder folder;
  kernels::Digest saved;
  std::string path;
  run_thread_ranks(3, [&](int number, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    RankState rank(momentum_config(2), *group);
    const std::vector<float> momentum(1009, 0.125f);
    rank.access().write_state(2, 0, momentum);
    const Logger log(number, LogLevel::off);
    CheckpointSession session(rank.store, rank.config, *group, *rank.device, rank.host, posix_file_system(),
                              log, nullptr);
    EXPECT_FALSE(session.in_progress());
    int described = 0;
    SaveOptions options;
    const std::string will_be =
        session.save(folder.path(), options, 3, true, [&](checkpoint::Manifest& manifest) {
          ++described;
          manifest.run.user = R"({"run":"says"})";
        });
    EXPECT_EQ(described, number == 0 ? 1 : 0);
    EXPECT_TRUE(session.in_progress());
    // The save has its own copy; later writes are not in the checkpoint.
    const kernels::Digest before = rank.access().digest(detail::TensorAccess::Digested::weights_and_state);
    rank.access().write_weight(1, std::vector<float>(7, 9.0f));
    EXPECT_EQ(session.finish(), will_be);
    EXPECT_FALSE(session.in_progress());
    EXPECT_EQ(session.finish(), "");
    if (number == 0) {
      saved = before;
      path = will_be;
    }
    session.close(true);
  });
  run_thread_ranks(2, [&](int, const CommunicatorFactory& factory) {
    const std::unique_ptr<Communicator> group = factory({});
    RankState rank(momentum_config(3), *group);
    const std::unique_ptr<detail::BlockIo> io = detail::make_block_io();
    checkpoint::Reader reader({posix_file_system(), *io, rank.host}, path);
    EXPECT_EQ(reader.manifest().run.user, R"({"run":"says"})");
    read_sections(rank.store, reader, match_tensors(rank.store, reader, {}, "Momentum"),
                  detail::checkpoint_layout(rank.store, DataType::float32, Mesh(2)).sections, *rank.device,
                  rank.host);
    for (detail::FlatBuffer* flat : rank.store.trainable()) rank.store.publish(*flat, "load");
    EXPECT_TRUE(rank.access().digest(detail::TensorAccess::Digested::weights_and_state) == saved);
  });
}

/// The session of a run on one rank.
struct OneRank {
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  RankState rank{momentum_config(1), *alone};
  const Logger log{0, LogLevel::off};
  CheckpointSession session{rank.store, rank.config,         *alone, *rank.device,
                            rank.host,  posix_file_system(), log,    nullptr};
};

TEST(CheckpointSession, EverySaveHasTheSameMasterFile) {
  const testing::TestFolder folder;
  OneRank run;
  CheckpointSession& session = run.session;
  const auto save = [&](std::int64_t step) {
    (void)session.save(folder.path(), {}, step, true, [](checkpoint::Manifest&) {});
    return posix_file_system().read_file(session.finish() + "/" + std::string(checkpoint::master_name));
  };
  const std::string first = save(1);
  EXPECT_THAT(first, ::testing::StartsWith("\x89HDF\r\n"));
  EXPECT_EQ(save(2), first);
  session.close(true);
}

TEST(CheckpointSession, AFailedSaveIsToldOnceAndTheNextOneWorks) {
  const testing::TestFolder folder;
  OneRank run;
  CheckpointSession& session = run.session;
  const std::string blocked = folder / "file";
  posix_file_system().open(blocked, detail::OpenMode::create_new, detail::Caching::buffered);
  EXPECT_THAT(message_of<CheckpointError>([&] {
                (void)session.save(blocked, {}, 1, true, [](checkpoint::Manifest&) {});
                (void)session.finish();
              }),
              HasSubstr("cannot save step 1 to " + blocked));
  session.throw_failure();  // the failure has been reported
  EXPECT_FALSE(session.in_progress());
  SaveOptions options;
  options.wait = true;
  const std::string path = session.save(folder / "run", options, 2, true, [](checkpoint::Manifest&) {});
  EXPECT_TRUE(std::filesystem::exists(path));
  session.close(true);
}

}  // namespace
}  // namespace tranche::test
