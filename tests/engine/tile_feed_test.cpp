// The hand-over of tiles: each is used before the giver continues, and nothing waits for tiles that never
// come.

#include "engine/tile_feed.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/core/error_text.h"

namespace tranche::test {
namespace {

using detail::TileFeed;
using detail::TileGiver;

TileFeed::Tile tile(std::int64_t begin, std::byte* memory = nullptr) {
  TileFeed::Tile result{3, {}};
  result.slice.range = {begin, begin + 10};
  result.slice.master = {memory, DataType::float32, Shape{10}};
  return result;
}

TEST(TileFeed, AGiverGoesOnOnceItsTileWasUsed) {
  TileFeed feed;
  std::byte memory{1};  // changed as soon as a giver continues
  std::thread giver([&] {
    for (int i = 1; i <= 200; ++i) {
      memory = static_cast<std::byte>(i);
      feed.hand_over(tile(10 * i, &memory));
      memory = std::byte{0};
    }
    feed.finish();
  });
  int taken = 0;
  while (feed.take([&](const TileFeed::Tile& one) {
    ++taken;
    EXPECT_EQ(one.buffer, 3);
    EXPECT_EQ(one.slice.range, (detail::ElementRange{10 * taken, 10 * taken + 10}));
    EXPECT_EQ(*static_cast<const std::byte*>(one.slice.master.data), static_cast<std::byte>(taken));
  })) {
  }
  EXPECT_EQ(taken, 200);
  giver.join();
}

TEST(TileFeed, NobodyWaitsForATakerThatIsGone) {
  TileFeed feed;
  EXPECT_TRUE(feed.wanted());
  std::thread giver([&] {
    for (int i = 0; i < 3; ++i) feed.hand_over(tile(i));
  });
  EXPECT_THROW((void)feed.take([](const TileFeed::Tile&) { throw InvalidArgument("disk full"); }),
               InvalidArgument);
  giver.join();
  EXPECT_FALSE(feed.wanted());

  TileFeed other;
  std::thread waiting([&] { other.hand_over(tile(0)); });
  other.close();
  waiting.join();
  EXPECT_THROW((void)other.take([](const TileFeed::Tile&) {}), LogicError);
}

TEST(TileFeed, NobodyWaitsForTilesThatDoNotCome) {
  TileFeed feed;
  std::thread canceller([&] { feed.cancel(); });
  EXPECT_EQ(
      message_of<CheckpointError>([&] { (void)feed.take([](const TileFeed::Tile&) {}); }),
      "state on the nvme tier was not read to its end: the step that was to do so failed, or the engine "
      "ended");
  canceller.join();
  EXPECT_FALSE(feed.wanted());
  feed.hand_over(tile(0));  // returns at once
  feed.finish();            // after the end
  EXPECT_THROW((void)feed.take([](const TileFeed::Tile&) {}), CheckpointError);
}

TEST(TileFeed, WhatIsBeingUsedIsWaitedForAlsoWhenCancelled) {
  TileFeed feed;
  std::atomic<bool> used = false;
  std::thread giver([&] {
    feed.hand_over(tile(0));
    EXPECT_TRUE(used);
  });
  (void)feed.take([&](const TileFeed::Tile&) {
    feed.cancel();
    std::this_thread::yield();
    used = true;
  });
  giver.join();
}

TEST(TileFeed, TheLastGiverThatGoesWithoutAllBeingHandedOverCancels) {
  const auto feed = std::make_shared<TileFeed>();
  {
    const auto giver = std::make_shared<TileGiver>(feed);
    auto another = giver;
    another.reset();
    EXPECT_TRUE(feed->wanted());
  }
  EXPECT_FALSE(feed->wanted());

  const auto whole = std::make_shared<TileFeed>();
  {
    TileGiver giver(whole);
    giver.feed().finish();
  }
  EXPECT_FALSE(whole->take([](const TileFeed::Tile&) {}));
}

}  // namespace
}  // namespace tranche::test
