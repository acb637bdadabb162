{{/* Names, parts, and changes of pods. */}}

{{- define "saturate.name" -}}
{{- $name := .Values.name | default .Release.Name -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" $name) -}}
{{- fail (printf "name: must begin with a letter and have at most 47 letters, digits and hyphens, not %q; set `name`, or choose another release name" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* A part of the manifests as YAML, with the names of this release; arguments: the root, the part. */}}
{{- define "saturate.part" -}}
{{- $root := first . -}}
{{- $root.Files.Get (printf "parts/%s.yaml" (last .)) | replace "@name@" (include "saturate.name" $root) -}}
{{- end -}}

{{/* The name of an image; arguments: the root, the image. */}}
{{- define "saturate.image" -}}
{{- $images := (first .).Values.images -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- if contains "@" (last .) }}{{ last . }}{{ else }}{{ printf "%s:%s" (last .) $images.tag }}{{ end -}}
{{- end -}}

{{/* Changes the pods of a group; arguments: the root, the group, the image, the values of the pods. */}}
{{- define "saturate.setPods" -}}
{{- $root := index . 0 -}}
{{- $spec := (index . 1).template.spec -}}
{{- $values := index . 3 -}}
{{- $container := first $spec.containers -}}
{{- $_ := set $container "image" (include "saturate.image" (list $root (index . 2))) -}}
{{- $_ := set $container "resources" (deepCopy $values.resources) -}}
{{- range (list "nodeSelector" "tolerations") -}}
{{- if index $values . -}}
{{- $_ := set $spec . (index $values .) -}}
{{- else -}}
{{- $_ := unset $spec . -}}
{{- end -}}
{{- end -}}
{{- with $root.Values.images.pullSecrets -}}
{{- $secrets := list -}}
{{- range . }}{{ $secrets = append $secrets (dict "name" .) }}{{ end -}}
{{- $_ := set $spec "imagePullSecrets" $secrets -}}
{{- end -}}
{{- end -}}

{{/* Sets the numbers of a group; arguments: the root, the group, its section of the values, least and most pods. */}}
{{- define "saturate.setReplicas" -}}
{{- $root := index . 0 -}}
{{- $group := index . 1 -}}
{{- $section := index . 2 -}}
{{- $values := index $root.Values $section -}}
{{- $low := ternary (index . 3) $values.minReplicas (kindIs "string" $values.minReplicas) | int -}}
{{- $high := ternary (index . 4) $values.maxReplicas (kindIs "string" $values.maxReplicas) | int -}}
{{- if lt $high (int (index . 4)) -}}
{{- fail (printf "%s.maxReplicas: %d, but the replicas of %s need %d pods; raise it, or lower max_replicas in the config" $section $high (include "saturate.configSource" $root) (int (index . 4))) -}}
{{- end -}}
{{- if gt $low $high -}}
{{- fail (printf "%s.minReplicas: %d is more than %s.maxReplicas, %d" $section $low $section $high) -}}
{{- end -}}
{{- $_ := set $group "replicas" $low -}}
{{- $_ := set $group "minReplicas" $low -}}
{{- $_ := set $group "maxReplicas" $high -}}
{{- end -}}

{{/* Changes a claim; arguments: the claim (or its template), size, storage class. */}}
{{- define "saturate.setClaim" -}}
{{- $spec := (index . 0).spec -}}
{{- $_ := set $spec.resources.requests "storage" (index . 1) -}}
{{- with index . 2 }}{{ $_ := set $spec "storageClassName" . }}{{ end -}}
{{- end -}}
