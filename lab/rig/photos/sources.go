package photos

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Source is one photograph and the class that its crops belong to.
type Source struct {
	Class string // folder name
	Path  string
}

// pack is a Debian package and the photographs in it.
type pack struct {
	name   string
	format string // path of a file, with %s for its name
	photos [][2]string
}

// packs lists the photographs by hand. Most wallpapers are drawings, renderings and gradients, and
// no measure of texture tells them from a foggy lake; each file here has been looked at. Of
// gnome-backgrounds (43, Debian 12) none is a photograph, nor are Autumn and Volna of the others.
var packs = []pack{
	{"plasma-workspace-wallpapers", "/usr/share/wallpapers/%s/contents/images/2560x1600.jpg", [][2]string{
		{"by_the_water", "BytheWater"}, {"cold_ripple", "ColdRipple"}, {"colorful_cups", "ColorfulCups"},
		{"darkest_hour", "DarkestHour"}, {"evening_glow", "EveningGlow"}, {"fallen_leaf", "FallenLeaf"},
		{"grey", "Grey"}, // is stored in one component
		{"kite", "Kite"}, {"one_stands_out", "OneStandsOut"}, {"path", "Path"}, {"summer_1am", "summer_1am"},
	}},
	{"mate-backgrounds", "/usr/share/backgrounds/mate/nature/%s.jpg", [][2]string{
		{"aqua", "Aqua"}, {"blinds", "Blinds"}, {"dune", "Dune"}, {"fresh_flower", "FreshFlower"}, {"garden", "Garden"},
		{"green_meadow", "GreenMeadow"}, {"lady_bird", "LadyBird"}, {"rain_drops", "RainDrops"}, {"storm", "Storm"},
		{"two_wings", "TwoWings"}, {"wood", "Wood"}, {"yellow_flower", "YellowFlower"},
	}},
}

// Missing are the packages whose photographs are not there.
type Missing []string

func (m Missing) Error() string {
	return "photographs are missing: install the wallpaper packages: apt-get install --no-install-recommends " +
		strings.Join(m, " ")
}

// Sources returns the photographs, in the order of their classes' numbers. If one is not there the error is [Missing].
func Sources() ([]Source, error) { return sourcesIn("/") }

func sourcesIn(root string) ([]Source, error) {
	var found []Source
	var missing Missing
	for _, p := range packs {
		for _, photo := range p.photos {
			path := filepath.Join(root, fmt.Sprintf(p.format, photo[1]))
			if fi, err := os.Stat(path); err == nil && fi.Mode().IsRegular() {
				found = append(found, Source{Class: photo[0], Path: path})
			} else if !slices.Contains(missing, p.name) {
				missing = append(missing, p.name)
			}
		}
	}
	if len(missing) > 0 {
		return nil, missing
	}
	return found, nil
}
