#include "tranche/engine/model_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>

#include "tests/core/error_text.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using test::message_of;
using ::testing::HasSubstr;

UnitSpec unit(std::string name, std::vector<std::pair<std::string, Shape>> tensors, int uses = 1) {
  UnitSpec spec;
  spec.name = std::move(name);
  spec.uses_per_micro_batch = uses;
  for (auto& [tensor, shape] : tensors) spec.tensors.push_back({tensor, shape, Initializer::zeros()});
  return spec;
}

TEST(ModelSpec, KeepsUnitsInOrder) {
  ModelSpec model;
  EXPECT_EQ(model.parameters(), 0);
  const UnitId wte = model.add_unit(unit("wte", {{"wte.weight", {11, 3}}}, 2));
  const UnitId block = model.add_unit(unit("h.0", {{"h.0.w", {3, 3}}, {"h.0.b", {3}}}));
  EXPECT_EQ(wte.index, 0);
  EXPECT_EQ(block.index, 1);
  EXPECT_EQ(model.parameters(), 33 + 9 + 3);
  EXPECT_EQ(model.unit(block).tensors[1].name, "h.0.b");
  EXPECT_EQ(model.find_unit("h.0"), block);
  EXPECT_EQ(model.units().size(), 2U);
}

TEST(ModelSpec, WithoutItsUnitsSaysAllElse) {
  ModelSpec model;
  model.name = "named";
  model.tokens_per_sample = 7;
  model.sequence_parts = model.chain_sums = true;
  model.tensor_dimensions = {"inner"};
  model.context_elements = [](const Config&, const Mesh&, int, int) { return std::int64_t{5}; };
  UnitSpec spec = unit("h.0", {{"h.0.w", {3, 3}}});
  spec.tensors[0].aliases = {"other"};
  model.add_unit(spec);
  ModelSpec copy = model.without_units();
  EXPECT_TRUE(copy.units().empty());
  copy.add_unit(spec);
  EXPECT_EQ(copy.hash(), model.hash()) << "names may be used again";
  EXPECT_EQ(copy.name, "named");
  EXPECT_TRUE(copy.sequence_parts && copy.chain_sums && copy.context_elements);
  EXPECT_EQ(copy.tensor_dimensions, model.tensor_dimensions);
}

TEST(ModelSpec, RefusesInitializersWithoutValues) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const auto told = [](const Initializer& how) {
    ModelSpec model;
    UnitSpec spec = unit("u", {{"w", {3}}});
    spec.tensors[0].initializer = how;
    return message_of<InvalidArgument>([&] { model.add_unit(spec); });
  };
  const std::string place = "tensor 'w' of unit 'u' is initialized by ";
  const std::string order =
      "; the order is (standard deviation, mean), both finite and the deviation above 0; a constant is "
      "Initializer::constant";
  EXPECT_EQ(told(Initializer::normal(0, 0.02f)), place + "normal(0, 0.02)" + order) << "torch's order";
  EXPECT_EQ(told(Initializer::normal(-1)), place + "normal(-1, 0)" + order);
  EXPECT_EQ(told(Initializer::normal(nan)), place + "normal(nan, 0)" + order);
  EXPECT_EQ(told(Initializer::normal(1, inf)), place + "normal(1, inf)" + order);
  EXPECT_EQ(told(Initializer::constant(nan)), place + "constant(nan), which is not finite");
  EXPECT_EQ(told(Initializer::uniform(2, 1)),
            place + "uniform(2, 1); the order is (low, high), both finite and low below high");
  EXPECT_THAT(told(Initializer::uniform(1, 1)), HasSubstr("low below high"));
  EXPECT_THAT(told(Initializer::uniform(-inf, 1)), HasSubstr("both finite"));
}

TEST(ModelSpec, RefusesWhatCannotBe) {
  ModelSpec model;
  model.add_unit(unit("a", {{"a.w", {2}}}));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("", {{"b.w", {2}}}));
              }),
              HasSubstr("a unit has no name"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("a", {{"b.w", {2}}}));
              }),
              HasSubstr("there are two units 'a'"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.add_unit(unit("b", {})); }),
              HasSubstr("unit 'b' has no tensors"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("b", {{"b.w", {2}}}, 0));
              }),
              HasSubstr("'b' is used 0 times a micro-batch"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("b", {{"", {2}}}));
              }),
              HasSubstr("a tensor of unit 'b' has no name"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("b", {{"b.w", {2, 0}}}));
              }),
              HasSubstr("tensor 'b.w' of unit 'b' has no elements (shape [2, 0])"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("b", {{"b.w", {2}}, {"b.w", {3}}}));
              }),
              HasSubstr("unit 'b' has two tensors 'b.w'"));
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                model.add_unit(unit("b", {{"a.w", {2}}}));
              }),
              HasSubstr("tensor 'a.w' of unit 'b' is in unit 'a' already"));
  for (const auto& [matrices, shape] :
       {std::pair(-1, Shape{6, 4}), std::pair(4, Shape{6, 4}), std::pair(2, Shape{6})}) {
    EXPECT_THAT(message_of<InvalidArgument>([&, matrices = matrices, shape = shape] {
                  UnitSpec wrong = unit("b", {{"b.w", shape}});
                  wrong.tensors[0].matrices = matrices;
                  model.add_unit(wrong);
                }),
                HasSubstr("tensor 'b.w' of unit 'b', of shape " + shape.to_string() + ", is not " +
                          std::to_string(matrices) + " matrices side by side"));
  }
  EXPECT_EQ(model.units().size(), 1U) << "nothing refused may stay";
}

TEST(ModelSpec, UnknownUnits) {
  ModelSpec model;
  model.add_unit(unit("h.10", {{"w", {2}}}));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.find_unit("h.1O"); }),
              HasSubstr("no unit 'h.1O' among 1; did you mean 'h.10'?"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.find_unit("elephant"); }),
              HasSubstr("no unit 'elephant' among 1"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)model.unit({1}); }),
              HasSubstr("there is no unit 1; the model has 1"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { (void)model.unit({}); }), HasSubstr("there is no unit -1"));
}

TEST(ModelSpec, AliasesAreNamesOfOneTensorOnly) {
  const auto aliased = [](const std::string& name, const std::vector<std::string>& aliases) {
    return UnitSpec{name, {{name + ".w", {2}, Initializer::zeros(), aliases}}, 1};
  };
  ModelSpec model;
  model.add_unit(aliased("a", {"head", "tail"}));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.add_unit(aliased("b", {"head"})); }),
              HasSubstr("alias 'head' of tensor 'b.w' is empty or there already"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.add_unit(aliased("b", {""})); }),
              HasSubstr("is empty"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.add_unit(aliased("b", {"a.w"})); }),
              HasSubstr("'a.w' is the name of one tensor and an alias of another"));
  EXPECT_THAT(message_of<InvalidArgument>([&] { model.add_unit(aliased("head", {"head.w"})); }),
              HasSubstr("'head.w' is the name"));
  ModelSpec other, plain;
  other.add_unit(aliased("a", {"head"}));
  plain.add_unit(aliased("a", {}));
  EXPECT_NE(model.hash(), other.hash());
  EXPECT_NE(other.hash(), plain.hash());
}

TEST(ModelSpec, DimensionsDivideTheirTensor) {
  const auto of = [](const std::vector<Dimension>& dimensions) {
    ModelSpec model;
    model.add_unit({"a", {{.name = "w", .shape = {4, 12}, .initializer = {}, .dimensions = dimensions}}, 1});
    return model;
  };
  const auto refusal = [&](const std::vector<Dimension>& dimensions) {
    return message_of<InvalidArgument>([&] { (void)of(dimensions); });
  };
  const char* text =
      "tensor 'w' of unit 'a' needs one dimension for each extent of its shape [4, 12]: its blocks must "
      "divide the extent, and its grain must divide each block";
  EXPECT_THAT(refusal({{"width"}}), HasSubstr(text));
  EXPECT_THAT(refusal({{"width"}, {"heads", 3, 3}}), HasSubstr(text));
  EXPECT_THAT(refusal({{"width"}, {"heads", 5}}), HasSubstr(text));
  ModelSpec cut = of({{"width"}, {"heads", 3, 2}});
  EXPECT_NE(cut.hash(), of({}).hash());
  EXPECT_NE(cut.hash(), of({{"width"}, {"heads", 3, 4}}).hash());
  EXPECT_THAT(cut.describe()[2], HasSubstr("dimension 'heads' of 3 blocks in grains of 2"));
  const std::uint64_t before = cut.hash();
  cut.tensor_dimensions = {"heads"};
  EXPECT_NE(cut.hash(), before);
}

TEST(ModelSpec, TheHashTellsNamesShapesOrderAndUses) {
  const auto hash = [](const std::vector<UnitSpec>& units) {
    ModelSpec model;
    for (const UnitSpec& spec : units) model.add_unit(spec);
    return model.hash();
  };
  const UnitSpec a = unit("a", {{"w", {2, 3}}});
  const UnitSpec b = unit("b", {{"v", {2}}});
  EXPECT_EQ(hash({a, b}), hash({a, b}));
  const std::set<std::uint64_t> hashes = {hash({}),
                                          hash({a}),
                                          hash({b}),
                                          hash({a, b}),
                                          hash({b, a}),
                                          hash({unit("a", {{"w", {3, 2}}})}),
                                          hash({unit("a", {{"w", {6}}})}),
                                          hash({unit("a", {{"w", {2, 3}}}, 2)}),
                                          hash({unit("aw", {{"x", {2, 3}}})}),
                                          hash({unit("a", {{"w", {2, 3}}, {"v", {2}}})})};
  EXPECT_EQ(hashes.size(), 10U);
  // Ranks with other initial weights, or other weights of samples, are distinguished as well.
  ModelSpec drawn, longer;
  drawn.add_unit({"a", {{"w", {2, 3}, Initializer::normal(0.02f)}}, 1});
  longer.add_unit(a);
  longer.tokens_per_sample = 7;
  EXPECT_FALSE(hashes.contains(drawn.hash()));
  EXPECT_FALSE(hashes.contains(longer.hash()));
}

}  // namespace
}  // namespace tranche
