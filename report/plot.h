#pragma once
/// Plots as SVG text: stacked areas over time, bars, lines. Each is one file without scripts and fonts, so
/// that browsers, editors and converters all show the same, and has a description for readers who do not see
/// it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tranche::plot {

/// A palette stands for one kind of thing: a category of memory (the colours of Okabe and Ito, "Color
/// universal design", 2008, which people with any form of colour vision can distinguish), a ZeRO stage (dark
/// to light), or a part of a step's time.
enum class Palette : std::uint8_t { category, stage, part };
/// "#rrggbb"; after the last colour they repeat.
std::string_view color(Palette palette, int index);
inline constexpr std::string_view grey = "#9a9a9a";

/// The format of an axis's numbers.
enum class Scale : std::uint8_t { number, bytes };
/// Marks of an axis from 0 (or a round number below `low`) to a round number at or above `high`.
struct Ticks {
  std::vector<double> values;
  std::vector<std::string> labels;  ///< "256 MiB", "1.5 GiB"; "0.25", "2000"
};
/// Chooses about `target_count` marks.
Ticks ticks(double low, double high, Scale scale, int target_count = 6);

struct Series {
  std::string name;
  std::string color;
  std::vector<double> values;
  bool hatched = false;  ///< capacity that is held but empty, or only predicted
};

/// A range of the x axis, named in a row above the plot if its name fits.
struct Band {
  double begin = 0, end = 0;
  std::string label;
  std::string color;  ///< empty: none, separated by lines
};
struct BandRow {
  std::string name;
  std::vector<Band> bands;
};

struct Mark {
  double x = 0, y = 0;
  std::string label;
};

/// Areas stacked in the order of `series`, the first at the bottom: value i holds from edge i to edge i + 1.
struct AreaChart {
  std::string title, subtitle, x_label, y_label;
  Scale y_scale = Scale::bytes;
  std::vector<double> edges;  ///< rising; one more than values
  std::vector<Series> series;
  std::vector<BandRow> rows;
  std::vector<Mark> marks;
};

/// Bars side by side for each label, or, stacked, one bar of all series for each label.
struct BarChart {
  std::string title, subtitle, x_label, y_label;
  Scale y_scale = Scale::bytes;
  bool stacked = false;
  std::vector<std::string> labels;  ///< one for each value; a line break begins a second line
  std::vector<Series> series;
  std::vector<std::string> notes;  ///< above the bars; one for each label, or none
  std::vector<BandRow> rows;       ///< above the bars: label i covers i to i + 1
};

/// Shapes distinguish points that may overlap.
enum class Shape : std::uint8_t { circle, square, triangle, diamond };

struct LineSeries {
  std::string name;  ///< in the legend; empty: no entry
  std::string color;
  std::vector<double> x, y;
  bool dashed = false;  ///< a line without points
  bool joined = true;   ///< points with a line
  bool hollow = false;  ///< points that are only outlined
  Shape shape = Shape::circle;
  std::string end = {};                     ///< beside the last point
  std::vector<double> low = {}, high = {};  ///< the ranges of y; empty: none
};
/// Points joined by lines. A logarithmic x axis and bytes have their marks at powers of two, other numbers at
/// 1, 2 and 5 times powers of ten.
struct LineChart {
  std::string title, subtitle, x_label, y_label;
  Scale y_scale = Scale::number;
  bool logarithmic = false;    ///< both axes
  bool logarithmic_x = false;  ///< the x axis
  std::vector<LineSeries> series;
  std::vector<LineSeries> legend;  ///< more entries of the legend, without points
  std::vector<Band> bands;         ///< shaded, with their names at the top
};

/// The whole file. Throws InvalidArgument if lengths do not match or numbers are negative or not finite.
std::string to_svg(const AreaChart& chart);
std::string to_svg(const BarChart& chart);
std::string to_svg(const LineChart& chart);

}  // namespace tranche::plot
