//! Bar charts as SVG: a column of panels, each with its own scale, for light and dark pages.

use std::fmt::Write as _;

use tidegate_bench::spread::Spread;

use super::thousands;

pub(super) struct Chart {
    pub(super) title: String,
    pub(super) panels: Vec<Panel>,
}

pub(super) struct Panel {
    pub(super) title: String,
    pub(super) bars: Vec<Bar>,
}

pub(super) struct Bar {
    pub(super) label: String,
    pub(super) value: Spread,
    /// Whether the bar is Tidegate's, which is highlighted.
    pub(super) ours: bool,
}

const WIDTH: f64 = 760.0;
const LABELS: f64 = 250.0;
const BARS: f64 = 400.0;
const BAR: f64 = 22.0;
/// A bar that is longer than the second longest by this factor is truncated.
const MAX_LENGTH_RATIO: f64 = 6.0;

const STYLE: &str = "<style>\
    text{font:13px system-ui,sans-serif;fill:#1f2328}\
    .title{font-size:16px;font-weight:600}.panel{font-weight:600}\
    .page{fill:#fff}.ours{fill:#0b7285}.other{fill:#adb5bd}\
    .spread{stroke:#1f2328;stroke-width:1.5}.cut{stroke:#fff;stroke-width:5}\
    @media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}\
    .ours{fill:#3bc9db}.other{fill:#6e7681}\
    .spread{stroke:#e6edf3}.cut{stroke:#0d1117}}</style>";

impl Chart {
    pub(super) fn svg(&self) -> String {
        let mut body = String::new();
        let mut top = 30.0;
        let _ =
            write!(body, r#"<text class="title" x="12" y="{top}">{}</text>"#, escaped(&self.title));
        for panel in &self.panels {
            top += 32.0;
            let _ = write!(
                body,
                r#"<text class="panel" x="12" y="{top}">{}</text>"#,
                escaped(&panel.title)
            );
            top += 8.0;
            let full_width = panel.full_width();
            for bar in &panel.bars {
                bar.draw(&mut body, top, BARS / full_width);
                top += BAR;
            }
        }
        let height = top + 16.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">{STYLE}\
             <rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\"/>{body}</svg>\n"
        )
    }
}

impl Panel {
    /// Returns the value at the full width. One bar that is much longer than the others is
    /// truncated, so that the others remain readable.
    fn full_width(&self) -> f64 {
        let mut bars: Vec<Spread> = self.bars.iter().map(|bar| bar.value).collect();
        bars.sort_by(|one, other| other.median.total_cmp(&one.median));
        let is_truncated = bars.len() > 2 && bars[0].median > MAX_LENGTH_RATIO * bars[1].median;
        let visible = if is_truncated { &bars[1..] } else { &bars[..] };
        let longest = visible.iter().map(|bar| bar.max).fold(f64::MIN_POSITIVE, f64::max);
        if is_truncated { longest * 1.4 } else { longest }
    }
}

impl Bar {
    /// Draws the bar up to the median, a line from minimum to maximum, and the median as text.
    fn draw(&self, body: &mut String, top: f64, scale: f64) {
        let (text, middle) = (top + 15.0, top + 10.5);
        let is_truncated = self.value.median * scale > BARS;
        let (width, min, max) = if is_truncated {
            (BARS, LABELS + BARS, LABELS + BARS)
        } else {
            (
                self.value.median * scale,
                LABELS + self.value.min * scale,
                LABELS + self.value.max * scale,
            )
        };
        let class = if self.ours { "ours" } else { "other" };
        let label = escaped(&self.label);
        let _ = write!(
            body,
            r#"<text x="{:.0}" y="{text:.1}" text-anchor="end">{label}</text>"#,
            LABELS - 8.0
        );
        let bar = top + 3.0;
        let _ = write!(
            body,
            "<rect class=\"{class}\" x=\"{LABELS}\" y=\"{bar:.1}\" width=\"{width:.1}\" \
             height=\"16\" rx=\"2\"/>"
        );
        if is_truncated {
            let (cut, bottom) = (LABELS + BARS * 0.92, bar + 18.0);
            let _ = write!(body, r#"<path class="cut" d="M{cut:.0} {bottom:.1}l8 -20"/>"#);
        } else {
            let _ = write!(body, r#"<path class="spread" d="M{min:.1} {middle:.1}H{max:.1}"/>"#);
        }
        let figures = figures(self.value.median);
        let _ = write!(
            body,
            r#"<text x="{:.1}" y="{text:.1}">{figures}</text>"#,
            max.max(LABELS + width) + 8.0
        );
    }
}

pub(super) fn figures(number: f64) -> String {
    if number < 100.0 { format!("{number:.1}") } else { thousands(number) }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
