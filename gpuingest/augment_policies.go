package gpuingest

// chance is an operation of a policy, its probability and its level of ten.
type chance struct {
	deed  deed
	p     float64
	level int
}

// policies are those of AutoAugment's authors (Cubuk, Zoph, Mane, Vasudevan, Le: "AutoAugment: Learning
// Augmentation Strategies from Data", CVPR 2019), in torchvision's order.
var policies = map[string][][2]chance{
	"imagenet": {
		{{doPosterize, 0.4, 8}, {doRotate, 0.6, 9}}, {{doSolarize, 0.6, 5}, {doAutoContrast, 0.6, 0}},
		{{doEqualize, 0.8, 0}, {doEqualize, 0.6, 0}}, {{doPosterize, 0.6, 7}, {doPosterize, 0.6, 6}},
		{{doEqualize, 0.4, 0}, {doSolarize, 0.2, 4}}, {{doEqualize, 0.4, 0}, {doRotate, 0.8, 8}},
		{{doSolarize, 0.6, 3}, {doEqualize, 0.6, 0}}, {{doPosterize, 0.8, 5}, {doEqualize, 1.0, 0}},
		{{doRotate, 0.2, 3}, {doSolarize, 0.6, 8}}, {{doEqualize, 0.6, 0}, {doPosterize, 0.4, 6}},
		{{doRotate, 0.8, 8}, {doColor, 0.4, 0}}, {{doRotate, 0.4, 9}, {doEqualize, 0.6, 0}},
		{{doEqualize, 0.0, 0}, {doEqualize, 0.8, 0}}, {{doInvert, 0.6, 0}, {doEqualize, 1.0, 0}},
		{{doColor, 0.6, 4}, {doContrast, 1.0, 8}}, {{doRotate, 0.8, 8}, {doColor, 1.0, 2}},
		{{doColor, 0.8, 8}, {doSolarize, 0.8, 7}}, {{doSharpness, 0.4, 7}, {doInvert, 0.6, 0}},
		{{doShearX, 0.6, 5}, {doEqualize, 1.0, 0}}, {{doColor, 0.4, 0}, {doEqualize, 0.6, 0}},
		{{doEqualize, 0.4, 0}, {doSolarize, 0.2, 4}}, {{doSolarize, 0.6, 5}, {doAutoContrast, 0.6, 0}},
		{{doInvert, 0.6, 0}, {doEqualize, 1.0, 0}}, {{doColor, 0.6, 4}, {doContrast, 1.0, 8}},
		{{doEqualize, 0.8, 0}, {doEqualize, 0.6, 0}},
	},
	"cifar10": {
		{{doInvert, 0.1, 0}, {doContrast, 0.2, 6}}, {{doRotate, 0.7, 2}, {doTranslateX, 0.3, 9}},
		{{doSharpness, 0.8, 1}, {doSharpness, 0.9, 3}}, {{doShearY, 0.5, 8}, {doTranslateY, 0.7, 9}},
		{{doAutoContrast, 0.5, 0}, {doEqualize, 0.9, 0}}, {{doShearY, 0.2, 7}, {doPosterize, 0.3, 7}},
		{{doColor, 0.4, 3}, {doBrightness, 0.6, 7}}, {{doSharpness, 0.3, 9}, {doBrightness, 0.7, 9}},
		{{doEqualize, 0.6, 0}, {doEqualize, 0.5, 0}}, {{doContrast, 0.6, 7}, {doSharpness, 0.6, 5}},
		{{doColor, 0.7, 7}, {doTranslateX, 0.5, 8}}, {{doEqualize, 0.3, 0}, {doAutoContrast, 0.4, 0}},
		{{doTranslateY, 0.4, 3}, {doSharpness, 0.2, 6}}, {{doBrightness, 0.9, 6}, {doColor, 0.2, 8}},
		{{doSolarize, 0.5, 2}, {doInvert, 0.0, 0}}, {{doEqualize, 0.2, 0}, {doAutoContrast, 0.6, 0}},
		{{doEqualize, 0.2, 0}, {doEqualize, 0.6, 0}}, {{doColor, 0.9, 9}, {doEqualize, 0.6, 0}},
		{{doAutoContrast, 0.8, 0}, {doSolarize, 0.2, 8}}, {{doBrightness, 0.1, 3}, {doColor, 0.7, 0}},
		{{doSolarize, 0.4, 5}, {doAutoContrast, 0.9, 0}}, {{doTranslateY, 0.9, 9}, {doTranslateY, 0.7, 9}},
		{{doAutoContrast, 0.9, 0}, {doSolarize, 0.8, 3}}, {{doEqualize, 0.8, 0}, {doInvert, 0.1, 0}},
		{{doTranslateY, 0.7, 9}, {doAutoContrast, 0.9, 0}},
	},
	"svhn": {
		{{doShearX, 0.9, 4}, {doInvert, 0.2, 0}}, {{doShearY, 0.9, 8}, {doInvert, 0.7, 0}},
		{{doEqualize, 0.6, 0}, {doSolarize, 0.6, 6}}, {{doInvert, 0.9, 0}, {doEqualize, 0.6, 0}},
		{{doEqualize, 0.6, 0}, {doRotate, 0.9, 3}}, {{doShearX, 0.9, 4}, {doAutoContrast, 0.8, 0}},
		{{doShearY, 0.9, 8}, {doInvert, 0.4, 0}}, {{doShearY, 0.9, 5}, {doSolarize, 0.2, 6}},
		{{doInvert, 0.9, 0}, {doAutoContrast, 0.8, 0}}, {{doEqualize, 0.6, 0}, {doRotate, 0.9, 3}},
		{{doShearX, 0.9, 4}, {doSolarize, 0.3, 3}}, {{doShearY, 0.8, 8}, {doInvert, 0.7, 0}},
		{{doEqualize, 0.9, 0}, {doTranslateY, 0.6, 6}}, {{doInvert, 0.9, 0}, {doEqualize, 0.6, 0}},
		{{doContrast, 0.3, 3}, {doRotate, 0.8, 4}}, {{doInvert, 0.8, 0}, {doTranslateY, 0.0, 2}},
		{{doShearY, 0.7, 6}, {doSolarize, 0.4, 8}}, {{doInvert, 0.6, 0}, {doRotate, 0.8, 4}},
		{{doShearY, 0.3, 7}, {doTranslateX, 0.9, 3}}, {{doShearX, 0.1, 6}, {doInvert, 0.6, 0}},
		{{doSolarize, 0.7, 2}, {doTranslateY, 0.6, 7}}, {{doShearY, 0.8, 4}, {doInvert, 0.8, 0}},
		{{doShearX, 0.7, 9}, {doTranslateY, 0.8, 3}}, {{doShearY, 0.8, 5}, {doAutoContrast, 0.7, 0}},
		{{doShearX, 0.7, 2}, {doInvert, 0.1, 0}},
	},
}
