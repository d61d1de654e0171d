#include "report/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tranche/core/error.h"

namespace tranche::plot {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// Empty if tags are balanced and everything is escaped; otherwise the problem. (The program's tests also
/// parse plots with a real parser.)
std::string problem_of(const std::string& xml) {
  std::vector<std::string> open;
  for (std::size_t i = xml.find("<svg"); i < xml.size();) {
    if (xml[i] != '<') {
      if (xml[i] == '&' && xml.find(';', i) > i + 6) return "a bare & at " + std::to_string(i);
      ++i;
      continue;
    }
    const std::size_t end = xml.find('>', i);
    if (end == std::string::npos) return "an open tag at " + std::to_string(i);
    const std::string tag = xml.substr(i + 1, end - i - 1);
    if (tag.find('<') != std::string::npos) return "a bare < in " + tag;
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "</" + tag + " closes nothing";
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(tag.substr(0, tag.find(' ')));
    }
    i = end + 1;
  }
  return open.empty() ? "" : "<" + open.back() + "> is never closed";
}

AreaChart area() {
  AreaChart chart;
  chart.title = "Memory <of> \"rank 0\" & others";
  chart.subtitle = "step 3";
  chart.x_label = "ms";
  chart.edges = {0, 1, 2.5, 4};
  chart.series = {{"parameters", std::string(color(Palette::category, 0)), {1 << 20, 1 << 20, 1 << 20}},
                  {"empty", std::string(grey), {0, 3 << 20, 0}, true}};
  chart.rows = {{"phase", {{0, 2, "forward", "#cfe2f3"}, {2, 2.0001, "reduce", ""}, {2, 4, "backward", ""}}}};
  chart.marks = {{1.5, 4 << 20, "peak 4.00 MiB"}};
  return chart;
}

TEST(Ticks, AreRoundInBinaryUnitsAndReachOverTheHighest) {
  const Ticks marks = ticks(0, 700.0 * (1 << 20), Scale::bytes);
  EXPECT_THAT(marks.labels,
              ElementsAre("0 MiB", "128 MiB", "256 MiB", "384 MiB", "512 MiB", "640 MiB", "768 MiB"));
  EXPECT_EQ(ticks(0, 1.6 * (1 << 30), Scale::bytes).labels[1], "0.5 GiB");
  EXPECT_THAT(ticks(0, 9.7, Scale::number).labels, ElementsAre("0", "2", "4", "6", "8", "10"));
  EXPECT_THAT(ticks(0, 0, Scale::bytes).labels.size(), ::testing::Ge(2u)) << "nothing is a plot too";
  for (const double high : {1.0, 3.0, 1023.0, 1024.0, 1025.0, 1e6, 5e12, 9e18}) {
    for (const Scale scale : {Scale::bytes, Scale::number}) {
      const Ticks some = ticks(0, high, scale);
      EXPECT_GE(some.values.back(), high);
      EXPECT_LE(some.values.size(), 9u) << high;
      EXPECT_GE(some.values.size(), 2u) << high;
    }
  }
  EXPECT_THROW(ticks(0, std::nan(""), Scale::number), InvalidArgument);
}

TEST(Plot, AreasAreWellFormedAndSayWhatTheyShow) {
  const std::string svg = to_svg(area());
  EXPECT_EQ(problem_of(svg), "");
  for (const char* text : {"Memory &lt;of&gt; &quot;rank 0&quot; &amp; others", "step 3", "parameters",
                           "empty", ">forward<", "peak 4.00 MiB", "4 MiB", "pattern"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
  EXPECT_THAT(svg, Not(HasSubstr(">reduce<"))) << "a name goes where it has room";
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(Plot, TextThatIsNoUtf8IsReplaced) {
  AreaChart chart = area();
  chart.title = "h\xff.0 \xc3\xa9 \xe2\x82";
  const std::string svg = to_svg(chart);
  EXPECT_THAT(svg, HasSubstr("h?.0 \xc3\xa9 ??"));
}

TEST(Plot, LabelsAreCutBetweenCharacters) {
  BarChart chart;
  std::string letters;
  for (int i = 0; i < 100; ++i) letters += "\xc3\xa9\xe2\x82\xac";  // two and three bytes
  chart.labels = {letters, "x" + letters};
  chart.series = {{"one", std::string(color(Palette::category, 1)), {5.0, 5.0}}};
  const std::string svg = to_svg(chart);
  EXPECT_EQ(problem_of(svg), "");
  EXPECT_THAT(svg, AnyOf(HasSubstr("\xc3\xa9..<"), HasSubstr("\xe2\x82\xac..<")));
  EXPECT_THAT(svg, Not(HasSubstr("?..")));
  chart.labels = {"\xc3\xa9\xe2\x82\xac", "b"};
  EXPECT_THAT(to_svg(chart), HasSubstr(">\xc3\xa9\xe2\x82\xac<"));
}

TEST(Plot, BarsSideBySideAndStacked) {
  BarChart chart;
  chart.title = "By rank";
  chart.labels = {"rank 0", "rank 1"};
  chart.notes = {"1 MiB", "2 MiB"};
  chart.series = {{"parameters", std::string(color(Palette::category, 0)), {1 << 20, 1 << 20}},
                  {"gradients", std::string(color(Palette::category, 3)), {0, 1 << 20}, true}};
  for (const bool stacked : {false, true}) {
    chart.stacked = stacked;
    const std::string svg = to_svg(chart);
    EXPECT_EQ(problem_of(svg), "");
    for (const char* text : {"By rank", "rank 1", "gradients", "2 MiB"}) EXPECT_THAT(svg, HasSubstr(text));
  }
  // Many labels leave room for each other.
  BarChart many;
  for (int i = 0; i < 200; ++i) many.labels.push_back("r" + std::to_string(i));
  many.series = {{"one", std::string(color(Palette::category, 1)), std::vector<double>(200, 5.0)}};
  const std::string svg = to_svg(many);
  EXPECT_THAT(svg, HasSubstr(">r0<"));
  EXPECT_THAT(svg, Not(HasSubstr(">r1<")));
}

TEST(Plot, LinesOnLinearAndLogarithmicAxes) {
  LineChart chart;
  chart.title = "Speed";
  chart.series = {
      {"measured", std::string(color(Palette::category, 0)), {1, 2, 4, 8}, {10, 19, 36, 66}, false},
      {"ideal", std::string(grey), {1, 8}, {10, 80}, true}};
  EXPECT_EQ(problem_of(to_svg(chart)), "");
  chart.logarithmic = true;
  const std::string svg = to_svg(chart);
  EXPECT_EQ(problem_of(svg), "");
  for (const char* text : {">8<", ">10<", ">50<", ">100<", "ideal", "stroke-dasharray"})
    EXPECT_THAT(svg, HasSubstr(text));
  chart.y_scale = Scale::bytes;
  EXPECT_THAT(to_svg(chart), HasSubstr(">128 B<"));
  chart.series[0].y[0] = 0;
  EXPECT_THROW(to_svg(chart), InvalidArgument);
  chart.logarithmic = false;
  chart.logarithmic_x = true;
  EXPECT_THAT(to_svg(chart), HasSubstr(">0 B<")) << "the y axis begins at nothing";
  chart.series[0].x[0] = 0;
  EXPECT_THROW(to_svg(chart), InvalidArgument);
}

TEST(Plot, LogarithmicMarksAreRoundNumbersAroundTheData) {
  LineChart chart;
  chart.logarithmic = true;
  const auto marks = [&](double low, double high) {
    chart.series = {{"s", std::string(color(Palette::category, 0)), {1, 2}, {low, high}, false}};
    return to_svg(chart);
  };
  EXPECT_THAT(marks(64934, 153354),
              AllOf(HasSubstr(">50000<"), HasSubstr(">70000<"), HasSubstr(">100000<"), HasSubstr(">150000<"),
                    HasSubstr(">200000<"), Not(HasSubstr(">30000<"))));
  EXPECT_THAT(marks(100, 100), AllOf(HasSubstr(">100<"), HasSubstr(">150<")));
  EXPECT_THAT(marks(9, 400),
              AllOf(HasSubstr(">5<"), HasSubstr(">20<"), HasSubstr(">500<"), Not(HasSubstr(">30<"))));
  EXPECT_THAT(marks(0.3, 1e6),
              AllOf(HasSubstr(">0.1<"), HasSubstr(">1000<"), HasSubstr(">1e+06<"), Not(HasSubstr(">500<"))));
}

TEST(Plot, PointsAloneBandsAndRowsOverBars) {
  LineChart chart;
  chart.logarithmic_x = true;
  chart.series = {{"measured",
                   std::string(color(Palette::category, 0)),
                   {1, 2},
                   {3, 4},
                   false,
                   false,
                   true,
                   Shape::square},
                  {"one", std::string(color(Palette::category, 1)), {1, 2}, {3, 4}, true},
                  {"other", std::string(color(Palette::category, 2)), {1, 2}, {3, 4}, true}};
  chart.bands = {{1.5, 1e9, "shared cores", ""}};
  const std::string svg = to_svg(chart);
  EXPECT_EQ(problem_of(svg), "");
  EXPECT_THAT(svg, AllOf(HasSubstr(">shared cores<"), HasSubstr(R"(v8h-8z" fill="none" stroke="#0072b2")"),
                         HasSubstr(R"(stroke-dashoffset="0")"), HasSubstr(R"(stroke-dashoffset="7")")));
  BarChart bars;
  bars.labels = {"0", "3", "0"};
  bars.series = {{"s", std::string(color(Palette::category, 0)), {1, 2, 3}}};
  bars.rows = {{"ranks", {{0, 2, "four", ""}, {2, 3, "eight", ""}}}};
  EXPECT_EQ(problem_of(to_svg(bars)), "");
  EXPECT_THAT(to_svg(bars), AllOf(HasSubstr(">ranks<"), HasSubstr(">four<"), HasSubstr(">eight<")));
}

TEST(Plot, LabelsAtTheEndsOfCurvesStandApart) {
  LineChart chart;
  for (int i = 0; i < 3; ++i) {
    LineSeries series{"", std::string(color(Palette::stage, i)), {1, 2}, {5, 5}};
    series.end = "stage " + std::to_string(i);
    chart.series.push_back(series);
  }
  chart.legend = {{"measured", "#222222", {}, {}}};
  const std::string svg = to_svg(chart);
  EXPECT_EQ(problem_of(svg), "");
  EXPECT_THAT(svg, HasSubstr(">measured<"));
  std::vector<double> heights;
  for (int i = 0; i < 3; ++i) {
    const std::size_t end = svg.find(">stage " + std::to_string(i) + "<");
    ASSERT_NE(end, std::string::npos);
    heights.push_back(std::stod(svg.substr(svg.rfind(" y=\"", end) + 4)));
  }
  std::sort(heights.begin(), heights.end());
  EXPECT_GE(heights[1] - heights[0], 15);
  EXPECT_GE(heights[2] - heights[1], 15);
  EXPECT_LE(heights[2], 600 - 64 + 5) << "not below the axis";
}

TEST(Plot, RangesAreDrawnWhereThereAreAny) {
  LineChart chart;
  chart.series = {{"a", "#123456", {1, 2}, {5, 6}}};
  chart.series[0].joined = false;
  const auto lines = [&] {
    const std::string svg = to_svg(chart);
    int count = 0;
    for (std::size_t i = svg.find("stroke=\"#123456\" stroke-width=\"1.5\""); i != std::string::npos;
         i = svg.find("stroke=\"#123456\" stroke-width=\"1.5\"", i + 1))
      ++count;
    return count;
  };
  EXPECT_EQ(lines(), 0);
  chart.series[0].low = {4, 6};
  chart.series[0].high = {7, 6};
  EXPECT_EQ(lines(), 3) << "one from 4 to 7, and its two ends";
  EXPECT_THAT(to_svg(chart), HasSubstr(">8<")) << "the axis reaches over the range";
  chart.series[0].high = {7};
  EXPECT_THROW(to_svg(chart), InvalidArgument);
}

TEST(Plot, EachHasADescription) {
  EXPECT_THAT(to_svg(area()),
              HasSubstr("<desc>Stacked areas over ms: parameters, empty. peak 4.00 MiB.</desc>"));
  BarChart bars;
  bars.labels = {"a\nb", "c"};
  bars.notes = {"1", "2 & 3"};
  bars.series = {{"s", "#000000", {1, 2}}};
  EXPECT_THAT(to_svg(bars), HasSubstr("<desc>Bars: s. a b: 1, c: 2 &amp; 3.</desc>"));
  LineChart lines;
  lines.x_label = "ranks";
  lines.series = {{"", "#000000", {1, 2}, {3, 4}}};
  lines.series[0].end = "stage 1";
  EXPECT_THAT(to_svg(lines), HasSubstr("<desc>Lines over ranks. stage 1 ends at 4.</desc>"));
}

TEST(Plot, PalettesHaveNoColourInCommon) {
  std::set<std::string_view> colors;
  for (int i = 0; i < 8; ++i) colors.insert(color(Palette::category, i));
  for (int i = 0; i < 4; ++i) {
    colors.insert(color(Palette::stage, i));
    colors.insert(color(Palette::part, i));
  }
  EXPECT_EQ(colors.size(), 16u);
}

TEST(Plot, RefusesWhatDoesNotFit) {
  const auto message = [](const auto& chart) -> std::string {
    try {
      to_svg(chart);
    } catch (const InvalidArgument& error) {
      return error.message();
    }
    return "no error";
  };
  AreaChart chart = area();
  chart.series[0].values.pop_back();
  EXPECT_EQ(message(chart), "plot: a series of another length than the chart's edges");
  chart = area();
  chart.series[0].values[0] = -1;
  EXPECT_EQ(message(chart), "plot: a value that is negative or not finite");
  chart = area();
  chart.edges = {0};
  EXPECT_EQ(message(chart), "plot: an area chart without extent");
  EXPECT_EQ(message(BarChart{}), "plot: a bar chart without bars");
  BarChart bars;
  bars.labels = {"a"};
  bars.series = {{"s", "#000000", {1}}};
  bars.notes = {"x", "y"};
  EXPECT_EQ(message(bars), "plot: notes for some of the bars only");
  EXPECT_EQ(message(LineChart{}), "plot: a line chart without lines");
}

}  // namespace
}  // namespace tranche::plot
